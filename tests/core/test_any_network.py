"""Networks that people really train: blocks computed twice, backward passes of their own, tensors held on the side."""

from __future__ import annotations

import random as pyrandom
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plausible as pl
from plausible.blocks.stochastic import Noise, gaussians
from plausible.core import random
from plausible.core.data import ArrayData, Batch
from plausible.core.model import Model
from plausible.core.priors import as_prior
from plausible.engine.method import Run


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = randn(24, 3), randn(24, 1, seed=1)


def quick(network: nn.Module, method: Any = None, data: Any = (X, Y), **settings: Any) -> Any:
    return pl.fit(network, data, method or pl.MAP(epochs=3, lr=0.05), **{"compile": False, "progress": False, **settings})


# ---------------------------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    """A block that is computed again in the backward pass, or not, with running statistics and dropout in it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.how = nn.Linear(3, 5), nn.Linear(5, 1), how
        self.block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2))
        self.runs = 0

    def run(self, h: Tensor) -> Tensor:
        self.runs += torch.is_grad_enabled()
        return self.block(h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.run(h) if self.how == "plain" else checkpoint(self.run, h, use_reentrant=self.how == "reentrant"))


class Nested(Blocks):
    """A block inside a block."""

    def run(self, h: Tensor) -> Tensor:
        h = self.first.weight.sum() * h
        return super().run(h) if self.how == "plain" else checkpoint(super().run, h, use_reentrant=self.how == "reentrant")


METHODS = {
    "map": pl.MAP(epochs=3),
    "mean-field": pl.MeanField(epochs=3),
    "samples": pl.MeanField(epochs=3, estimator="weights", samples=2),
    "laplace": pl.Laplace(mode=pl.MAP(epochs=3), structure="kron"),
    "sgld": pl.SGLD(epochs=3),
    "ensemble": pl.Ensemble(pl.MAP(epochs=3), members=2),
}


@pytest.mark.parametrize("how", ["reentrant", "not"])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_are_computed_twice_change_nothing(method: str, how: str) -> None:
    plain, twice = (quick(Blocks(kind), METHODS[method]).predict(X) for kind in ("plain", how))
    assert torch.equal(plain.mean, twice.mean)
    assert torch.equal(plain.epistemic, twice.epistemic)


@pytest.mark.parametrize("how", ["reentrant", "not"])
def test_blocks_inside_blocks(how: str) -> None:
    plain, twice = (quick(Nested(kind), METHODS["map"]).predict(X) for kind in ("plain", how))
    assert torch.allclose(plain.mean, twice.mean, atol=1e-6)


def test_blocks_are_computed_twice_where_that_saves_memory() -> None:
    fitted = {how: quick(Blocks(how), pl.MAP(epochs=10, batch_size=None)).model.network.runs for how in ("plain", "not")}
    assert fitted["not"] > fitted["plain"] + 8


# ---------------------------------------------------------------------------------------------------------------------
class Adjoint(torch.autograd.Function):
    """Ten Euler steps of y' = f(y), whose backward pass runs them again with the module's own parameters."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(y)
        return solved(module, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            grads = torch.autograd.grad(solved(ctx.module, y), (y, *ctx.parameters), grad, allow_unused=True)
        return None, *grads


def solved(module: nn.Module, y: Tensor) -> Tensor:
    for _ in range(10):
        y = y + 0.1 * module(y)
    return y


class Flow(nn.Module):
    def __init__(self, adjoint: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.field, self.head, self.adjoint = (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
            nn.Linear(3, 1),
            adjoint,
        )

    def forward(self, x: Tensor) -> Tensor:
        parameters = tuple(self.field.parameters())
        return self.head(Adjoint.apply(self.field, x, *parameters) if self.adjoint else solved(self.field, x))


@pytest.mark.parametrize("method", [*(name for name in METHODS if name != "laplace"), "full"])
def test_a_backward_pass_that_asks_the_module_for_its_weights_finds_those_of_the_pass(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = pl.Laplace(mode=None, structure="full") if method == "full" else METHODS[method]
    plain, adjoint = (quick(Flow(kind), chosen).predict(X) for kind in (False, True))
    assert torch.allclose(plain.mean, adjoint.mean, atol=1e-5)
    assert torch.allclose(plain.epistemic, adjoint.epistemic, rtol=1e-3, atol=1e-6)
    assert "do not influence" not in caplog.text


class Inside(torch.autograd.Function):
    """A block whose backward pass puts gradients into the parameters by itself."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return None, x.grad


class Homemade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Inside.apply(self.block, self.first(x)).tanh())


def test_gradients_that_nobody_could_find_are_refused() -> None:
    with pytest.raises(ValueError, match=r"puts gradients into parameters by itself.*use_reentrant=False"):
        quick(Homemade())


# ---------------------------------------------------------------------------------------------------------------------
class Held(nn.Module):
    """Random tensors as plain attributes: one by itself, one in a list, a layer in a dictionary, and a cache."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shift, self.tables = torch.randn(3), [torch.randn(3), torch.randn(3, 3)]
        self.hidden = {"mix": nn.Linear(3, 3)}
        torch.manual_seed(0)
        self.layer, self.kept, self.late = nn.Linear(3, 1), None, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden["mix"](x @ self.tables[1] + self.shift * self.tables[0])
        self.kept = self.layer(h)
        return self.kept


def test_tensors_that_are_not_registered_are_carried(tmp_path: Path) -> None:
    posterior = quick(Held(1), pl.MeanField(epochs=3))
    posterior.save(tmp_path / "run")
    other = Held(2)
    before = other.shift.clone()
    loaded = pl.load(tmp_path / "run", other)
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)
    assert torch.equal(other.shift, before)
    loaded.save(tmp_path / "again")
    assert torch.equal(pl.load(tmp_path / "again", Held(3)).predict(X).mean, posterior.predict(X).mean)


def test_a_network_without_a_place_for_them_is_refused(tmp_path: Path) -> None:
    quick(Held(1)).save(tmp_path / "run")
    other = Held(1)
    other.tables = other.tables[:1]
    with pytest.raises(ValueError, match=r"no tensor 'tables\.1'.*register_buffer"):
        pl.load(tmp_path / "run", other)


def test_a_checkpoint_belongs_to_the_tensors_that_it_was_written_with(tmp_path: Path) -> None:
    quick(Held(1), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="belongs to another run: fixed"):
        quick(Held(2), checkpoint=tmp_path)


def test_results_that_a_network_keeps_do_not_stop_it_from_being_copied() -> None:
    network = Held(1)
    network(X)  # keeps a tensor with a graph, of which PyTorch makes no deep copy
    kept = network.kept
    assert kept is not None
    assert kept.grad_fn is not None
    fitted = quick(network, pl.Ensemble(pl.MAP(epochs=2), members=2))
    assert network.kept is kept
    assert torch.isfinite(fitted.predict(X).mean).all()


# ---------------------------------------------------------------------------------------------------------------------
class Laid(nn.Module):
    """One layer over eight positions, which lie beside the examples in several ways."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.layout = nn.Linear(3, 4), layout

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.layout == "examples first":
            h = self.layer(x)
        elif self.layout == "positions first":
            h = self.layer(x.transpose(0, 1)).transpose(0, 1)
        elif self.layout == "flattened":
            h = self.layer(x.flatten(0, 1)).unflatten(0, (rows, 8))
        else:  # windows of four positions
            h = self.layer(x.view(rows * 2, 4, 3)).view(rows, 8, 4)
        return h.mean((1, 2)).unsqueeze(1)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("layout", ["examples first", "positions first", "flattened", "windows"])
def test_one_example_sees_one_noise(layout: str, estimator: Any) -> None:
    x, draws, scale = randn(5, 8, 3) + 1, 400, 0.3
    method = pl.MeanField(epochs=1, estimator=estimator)
    model = Model.build(Laid(layout), pl.likelihoods.Gaussian(1.0), as_prior(None), Batch(x, Y[:5]), num_data=5)
    run = Run(ArrayData(Batch(x, Y[:5]), 5), 0, 1, 1, None)
    ways = method.prepare(model, run).ways
    scales = {name: torch.full_like(w, scale) for name, w in model.initial.items()}
    keys = [Noise(random.key(1), i) for i in range(draws)]
    outputs = torch.stack([model.outputs(gaussians(model.initial, scales, noise, ways), x) for noise in keys])
    # the output of an example is Σ_ij w_ij x̄_j / 4 + Σ_i b_i / 4
    exact = scale * ((x.mean(1).square().sum(1) + 1) / 4).sqrt()
    assert torch.allclose(outputs.std(0).squeeze(1), exact, rtol=4.5 / (2 * draws) ** 0.5)


# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [pl.SGLD(epochs=4, lr=1e-9), pl.MeanField(epochs=1, initial_scale=1e-4)])
def test_the_summary_tells_what_half_precision_rounds_away(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Linear(3, 1)
    nn.init.constant_(network.weight, 1.0)
    nn.init.zeros_(network.bias)
    told = {row[0]: row[2] for row in quick(network.bfloat16(), method, likelihood=pl.likelihoods.Gaussian(1.0)).summary().rows}
    assert "but equal in all draws: bfloat16" in told["weight"]
    assert "network is in bfloat16" in caplog.text
    assert "equal" not in told["bias"]
    assert "equal" not in {row[0]: row[2] for row in quick(network.float(), method).summary().rows}["weight"]


# ---------------------------------------------------------------------------------------------------------------------
def drawn(*_: Any) -> float:
    """A number from each of the global generators."""
    return pyrandom.random() + np.random.random() + float(torch.rand(()))  # noqa: NPY002


class Drawing(nn.Module):
    """It draws numbers by itself, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 0.1 * drawn()


class Augmented(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        return X[i] + 0.1 * drawn(), Y[i]


def states() -> list[str]:
    numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]  # noqa: NPY002
    return [str(state) for state in (torch.get_rng_state().tolist(), pyrandom.getstate(), numpy)]


@pytest.mark.parametrize("method", ["map", "mean-field", "ensemble"])
def test_nobodys_generators_move(method: str) -> None:
    torch.manual_seed(0)
    network, results = Drawing(), []
    for seed in (1, 2):
        for begin in (torch.manual_seed, pyrandom.seed, np.random.seed):
            begin(seed)
        before = states()
        loader = torch.utils.data.DataLoader(Augmented(), batch_size=8, shuffle=True)
        posterior = quick(network, METHODS[method], loader, likelihood=pl.likelihoods.Gaussian(1.0))
        prior = posterior.model.prior_functions(X, 2)
        results.append(posterior.predict(X).mean + posterior.functions(X, 2).sum() + prior.sum())
        assert states() == before
    assert torch.equal(*results)


# ---------------------------------------------------------------------------------------------------------------------
TOKENS = torch.randint(0, 7, (24, 4), generator=torch.Generator().manual_seed(2))


class Words(nn.Module):
    def __init__(self, sparse: bool, bag: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(7, 3, sparse=sparse) if bag else nn.Embedding(7, 3, sparse=sparse)
        self.head, self.bag = nn.Linear(3, 1), bag

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) if self.bag else self.table(ids).mean(1))


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("method", ["map", "mean-field", "laplace"])
def test_sparse_gradients_are_a_detail(method: str, bag: bool) -> None:
    network = Words(True, bag)
    dense, sparse = (quick(net, METHODS[method], (TOKENS, Y)).predict(TOKENS) for net in (Words(False, bag), network))
    assert torch.equal(dense.mean, sparse.mean)
    assert network.table.sparse


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))


@pytest.mark.parametrize("inner", [False, True])
def test_compiled_modules_are_the_modules_in_them(inner: bool, tmp_path: Path) -> None:
    plain, other = perceptron(), perceptron()
    compiled: Any = torch.compile(other, backend="eager")
    if inner:
        other[0] = torch.compile(other[0], backend="eager")  # type: ignore[call-overload]
        compiled = other
    for net in (plain, other):
        net[2].eval()  # stays in evaluation mode while the others train
    fits = [quick(net, METHODS["mean-field"]) for net in (plain, compiled)]
    assert torch.equal(fits[0].predict(X).mean, fits[1].predict(X).mean)
    fits[1].save(tmp_path / "run")
    assert torch.equal(pl.load(tmp_path / "run", compiled).predict(X).mean, fits[0].predict(X).mean)
    assert torch.equal(pl.load(tmp_path / "run", plain).predict(X).mean, fits[0].predict(X).mean)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.layer(x if shift is None else x + shift)


def test_inputs_of_none_are_left_to_the_network() -> None:
    rows = torch.utils.data.Subset([{"x": x, "shift": None, "labels": y} for x, y in zip(X, Y)], range(24))  # type: ignore[arg-type]
    given: list[Any] = [({"x": X}, Y), ({"x": X, "shift": None}, Y), {"x": X, "shift": None, "labels": Y}, rows]
    means = [quick(Optional(), pl.MAP(epochs=3, batch_size=8), data).predict({"x": X, "shift": None}).mean for data in given]
    assert all(torch.equal(mean, means[0]) for mean in means)


class Graphs:
    edge_index = torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("network", "data", "message"),
    [
        (nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, track_running_stats=False)), (X, Y), "use track_running_stats=True"),
        (
            nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten()),
            (torch.ones(24, 1).long(), X),
            "max_norm .*: use max_norm=None",
        ),
        (nn.Linear(3, 1), (Graphs(), Y), "data are graphs, .* make them dense"),
        (nn.Linear(3, 1), [Graphs()], "data are graphs, .* make them dense"),
        (nn.Linear(3, 1), torch.utils.data.DataLoader([0] * 4, collate_fn=lambda _: Graphs()), "data are graphs"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_fitted_says_what_to_do(network: nn.Module, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(network, data=data)


def test_ragged_tensors_are_to_be_padded() -> None:
    ragged = torch.nested.nested_tensor([randn(1 + i % 3, 3) for i in range(24)], layout=torch.jagged)
    with pytest.raises(TypeError, match="to_padded_tensor"):
        quick(nn.Linear(3, 1), data=(ragged, Y))


@pytest.mark.slow
def test_exported_programs() -> None:
    with pytest.raises(TypeError, match=r"pass its module\(\)"):
        quick(torch.export.export(perceptron(), (X,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="export it with dynamic_shapes"):
        quick(torch.export.export(perceptron().eval(), (X,)).module())
    plain = nn.Sequential(*(layer for layer in perceptron() if not isinstance(layer, nn.Dropout)))
    whole = torch.export.export(plain, (X,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},))
    expected, found = (quick(net).predict(X).mean for net in (plain, whole.module()))
    assert torch.allclose(expected, found, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
class Encoder(nn.Module):
    """PyTorch's own transformer, or its attention alone, which in evaluation mode have a fused form without gradients."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole, self.head = whole, nn.Linear(4, 1)
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1) if whole else nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) if self.whole else self.body(x, x, x, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize("whole", [False, True])
def test_chains_have_gradients_of_attention(whole: bool) -> None:
    sampler = pl.NUTS(draws=1, warmup=1, chains=2, max_depth=1)
    posterior = quick(Encoder(whole), sampler, (randn(6, 5, 4), Y[:6]), likelihood=pl.likelihoods.Gaussian(1.0))
    assert torch.isfinite(posterior.predict(randn(3, 5, 4)).mean).all()
    assert torch.backends.mha.get_fastpath_enabled()


# ---------------------------------------------------------------------------------------------------------------------
class Tagger(nn.Module):
    """A class for each word."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


LENGTHS = [2, 2, 3, 3, 5, 5]
TAGS = pl.likelihoods.Categorical(ignore_index=-100)


def texts(padded: bool) -> torch.utils.data.DataLoader[Any]:
    """Two texts to a batch, all padded to five words or to the longer of the two."""
    stream = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 7, (n,), generator=stream) for n in LENGTHS]

    def collate(rows: list[Tensor]) -> dict[str, Tensor]:
        size = 5 if padded else max(map(len, rows))
        ids, labels = (torch.stack([F.pad(row, (0, size - len(row)), value=value) for row in rows]) for value in (0, -100))
        return {"ids": ids, "labels": torch.where(labels < 0, labels, labels % 4)}

    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["map", "sgld", "ensemble"])
def test_batches_may_be_padded_to_lengths_of_their_own(method: str) -> None:
    fixed, own = (quick(Tagger(), METHODS[method], texts(padded), likelihood=TAGS) for padded in (True, False))
    for words in (2, 4):
        ids = torch.arange(words * 3).view(3, words) % 7
        assert torch.allclose(fixed.predict(ids).probs, own.predict(ids).probs, atol=1e-5)
        assert own.predict(ids).log_prob(ids % 4).shape == (3,)
        assert own.functions(ids).shape[1:] == (3, words, 4)


def test_other_lengths_in_closed_form_say_what_to_do() -> None:
    posterior = quick(Tagger(), pl.Laplace("diag", mode=None), texts(True), likelihood=TAGS)
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"outputs of shape \(3, 4\) .* pass draws="):
        posterior.predict(ids)
    assert posterior.predict(ids, draws=5).probs.shape == (2, 3, 4)


def test_targets_of_a_stream_must_be_as_many_as_the_outputs() -> None:
    rows = [(torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long))] * 4
    with pytest.raises(ValueError, match="targets have shape"):
        quick(Tagger(), data=torch.utils.data.DataLoader(rows, batch_size=2), likelihood=TAGS)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("method", ["map", "samples"])
@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing_of_transformers(method: str) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = library.BertForTokenClassification(library.BertConfig(vocab_size=7, **sizes))
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        data = {"input_ids": TOKENS, "attention_mask": None, "labels": TOKENS % 3}
        fitted = quick(model.train(), METHODS[method], data, output=lambda result: result.logits)
        found.append(fitted.predict({"input_ids": TOKENS}).probs)
    assert torch.allclose(found[0], found[1], atol=1e-5)  # sums of gradients in another order
    assert torch.allclose(found[0], found[2], atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adjoints_of_torchdiffeq() -> None:
    library = pytest.importorskip("torchdiffeq")

    class Solved(nn.Module):
        def __init__(self, solve: Any) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.field, self.head, self.solve = Field(), nn.Linear(3, 1), solve

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.solve(self.field, x, torch.tensor([0.0, 1.0]), method="rk4", options={"step_size": 0.1})[-1])

    class Field(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)

        def forward(self, t: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(y).tanh()

    plain, adjoint = (quick(Solved(getattr(library, name))).predict(X).mean for name in ("odeint", "odeint_adjoint"))
    assert torch.allclose(plain, adjoint, atol=1e-3)


class Scaled(nn.Module):
    """A weight that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.scale = nn.Parameter(randn(3, 1, seed=2)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.slope)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_laplace_over_a_weight_that_is_one_number(structure: Any) -> None:
    """The curvature of log p(D) along the number is Σ (x·slope)²/σ², beside the precision of the prior."""
    network = Scaled()
    posterior = quick(
        network,
        pl.Laplace(structure, mode=None, tune=None, where="scale"),
        likelihood=pl.likelihoods.Gaussian(scale=1.0),
        prior=pl.priors.Gaussian(1.0),
    )
    expected = 1 / (1 + (X @ network.slope).square().sum())
    assert torch.allclose(posterior.scales["scale"].square(), expected, rtol=1e-4)


def test_an_ensemble_infers_what_its_members_infer(tmp_path: Path) -> None:
    """Laplace holds the noise at its value: the ensemble says so, and comes back from its file."""
    posterior = quick(nn.Linear(3, 1), pl.Ensemble(pl.Laplace("diag", mode=pl.MAP(epochs=2)), members=2))
    assert posterior.summary().rows[-1][2] == "trained as a point"
    posterior.save(tmp_path / "saved")
    again = pl.load(tmp_path / "saved", nn.Linear(3, 1))
    assert torch.equal(posterior.predict(X).mean, again.predict(X).mean)


@pytest.mark.parametrize("method", [pl.SGLD(epochs=10), pl.LowRank(epochs=3)])
def test_networks_in_half_precision(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Running means and Cholesky factors are wider than the weights."""
    posterior = quick(nn.Linear(3, 1).bfloat16(), method, (X.bfloat16(), Y))
    assert torch.isfinite(posterior.predict(X.bfloat16()).mean).all()


def test_dropout_of_the_network_predicts() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    assert (quick(network, pl.MCDropout(epochs=2)).predict(X, draws=20).epistemic > 0).all()


def test_a_fit_inside_inference_mode_is_usable_outside() -> None:
    with torch.inference_mode():
        x = X + 0
        posterior = quick(nn.Linear(3, 1), pl.Laplace(mode=pl.MAP(epochs=2)), (x, Y + 0))
    assert torch.isfinite(posterior.predict(X).std).all()
    posterior.functions(X, draws=3)
    assert not any(weight.is_inference() for weight in posterior.weights(2).values())


@pytest.mark.parametrize("method", [pl.MCDropout(epochs=2), pl.GaussianDropout(epochs=2), pl.ConcreteDropout(epochs=2)])
def test_noise_on_inputs_is_refused_where_a_backward_pass_would_not_see_it(method: Any) -> None:
    torchdiffeq = pytest.importorskip("torchdiffeq")

    class Solved(nn.Module):
        def __init__(self, solve: Any) -> None:
            super().__init__()
            self.field, self.head, self.solve = Field(), nn.Linear(3, 1), solve

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.solve(self.field, x, torch.tensor([0.0, 0.5]), method="rk4")[-1])

    with pytest.raises(ValueError, match=r"a backward pass of its own.*: solve by plain autograd \(odeint\)"):
        quick(Solved(torchdiffeq.odeint_adjoint), method)
    quick(Solved(torchdiffeq.odeint), method)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)
