"""Products with curvature matrices: against Jacobians and Hessians written out by torch.func, for every kind of network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plausible import likelihoods, priors
from plausible.blocks.curvature import losses, products
from plausible.blocks.curvature.products import (
    WAYS,
    Product,
    activation_bytes,
    choose_chunk,
    empirical_product,
    forecast_bytes,
    ggn_product,
    hessian_product,
    log_joint_gradient,
)
from plausible.core.data import ArrayData, Batch, StreamData
from plausible.core.model import Model
from plausible.core.weights import Weights, flatten, select, tree_map, unflatten

N, V = 7, 3
EXACT = {"atol": 1e-9, "rtol": 1e-8}
PRODUCTS = {"ggn": ggn_product, "empirical": empirical_product, "hessian": hessian_product}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.rnn, self.head = kind(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.gain = nn.Embedding(5, 2), nn.Linear(4, 2), nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.cat([self.words(tokens).mean(1), numbers], -1)) * self.gain.exp()


class Cube(torch.autograd.Function):
    """x³ in the style that no transform of torch.func accepts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Cube.apply(self.first(x)))


def network(name: str) -> tuple[nn.Module, Any]:
    """A small network and inputs for it; all have two outputs."""
    torch.manual_seed(0)
    tokens = torch.randint(5, (N, 4), generator=torch.Generator().manual_seed(3))
    made: tuple[nn.Module, Any] = {
        "mlp": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), randn(N, 3)),
        "conv": lambda: (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)),
            randn(N, 1, 5, 4),
        ),
        "lstm": lambda: (Recurrent(nn.LSTM), randn(N, 4, 2)),
        "gru": lambda: (Recurrent(nn.GRU), randn(N, 4, 2)),
        "attention": lambda: (
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True), nn.Flatten(), nn.Linear(12, 2)),
            randn(N, 3, 4),
        ),
        "named": lambda: (Named(), {"tokens": tokens, "numbers": randn(N, 2)}),
        "cubic": lambda: (Cubic(), randn(N, 2)),
    }[name]()
    return made[0].double(), made[1]


NETWORKS = ("mlp", "conv", "lstm", "gru", "attention", "named", "cubic")


def problem(
    net: nn.Module,
    x: Any,
    likelihood: likelihoods.Likelihood | None = None,
    weight: bool = False,
    mask: bool = False,
    **settings: Any,
) -> tuple[Model, Weights, ArrayData]:
    likelihood = likelihood or likelihoods.Categorical()
    if likelihood.kind == "classes":
        y = torch.randint(2, (N,), generator=torch.Generator().manual_seed(1))
    else:
        y = (randn(*likelihood.target_shape((N, 2)), seed=1) > 0).double()
    observed = torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.7 if mask else None
    batch = Batch(x, y, 0.5 + randn(N, seed=4).square() if weight else None, observed)
    model = Model.build(net, likelihood, priors.Gaussian(0.8), batch, num_data=N, **settings)
    return model, {**model.initial, **model.buffers}, ArrayData(batch, N)


def moving(model: Model) -> list[str]:
    return [name for name in model.random if name not in model.likelihood_names]


def in_one_vector(model: Model, weights: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """The random weights as a vector [P], and the way back to all weights."""
    own = select(weights, moving(model))
    return flatten(own), lambda vector: {**weights, **unflatten(vector, own)}


def dense(model: Model, weights: Mapping[str, Tensor], data: ArrayData, kind: str) -> Tensor:
    """The matrix itself, [P, P], from Jacobians and Hessians by autograd over one vector."""
    batch, (point, back) = data.all(), in_one_vector(model, weights)
    weight = torch.ones(N, dtype=torch.float64) if batch.weight is None else batch.weight

    def total(vector: Tensor) -> Tensor:
        return -(model.log_likelihood(back(vector), batch) * weight).sum()

    with products.kernels(plain=True):
        if kind == "hessian":
            return torch.autograd.functional.hessian(total, point)
        jacobian = torch.autograd.functional.jacobian(lambda v: model.outputs(back(v), batch.x), point)  # [N, O, P]
        outputs, noise = model.outputs(weights, batch.x), model.noise(weights)
    if kind == "empirical":
        score = losses.gradient(model.likelihood, outputs, batch.y, noise, batch.mask)
        each = torch.einsum("no,nop->np", score, jacobian)
        return torch.einsum("n,np,nq->pq", weight, each, each)
    fisher = losses.blocks(model.likelihood, outputs, noise, batch.mask)
    return torch.einsum("n,nop,nok,nkq->pq", weight, jacobian, fisher, jacobian)


def directions(model: Model, weights: Mapping[str, Tensor], count: int = V) -> Weights:
    return {name: randn(count, *weights[name].shape, seed=i) for i, name in enumerate(model.random)}


def compare(model: Model, weights: Weights, data: ArrayData, kind: str, found: Weights, vectors: Weights) -> None:
    names = moving(model)
    expected = flatten(select(vectors, names), 1) @ dense(model, weights, data, kind)
    torch.testing.assert_close(flatten(select(found, names), 1), expected, **EXACT)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_those_of_the_matrix(name: str, kind: str) -> None:
    model, weights, data = problem(*network(name), weight=True)
    vectors = directions(model, weights)
    compare(model, weights, data, kind, PRODUCTS[kind](model, weights, data, vectors), vectors)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_the_same(way: Any, kind: Any) -> None:
    model, weights, data = problem(*network("mlp"), weight=True)
    vectors = directions(model, weights)
    product = Product(model, weights, data, kind, chunk=4)
    product._ways = [way]
    compare(model, weights, data, kind, product(vectors), vectors)


def test_what_has_no_rule_is_done_by_the_next_way() -> None:
    left = {}
    for name in ("mlp", "lstm", "cubic"):
        model, weights, data = problem(*network(name))
        product = Product(model, weights, data)
        product(directions(model, weights))
        left[name] = len(product._ways)
    assert left["mlp"] == len(WAYS)
    assert 1 <= left["lstm"] <= len(WAYS)
    assert left["cubic"] == 1


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    "likelihood",
    [
        likelihoods.Gaussian(),
        likelihoods.HeteroscedasticGaussian(),
        likelihoods.StudentT(3.0, scale=0.7),
        likelihoods.Bernoulli(),
        likelihoods.Poisson(),
        likelihoods.NegativeBinomial(),
        likelihoods.Scaled(likelihoods.Gaussian("per-output"), 0.3, 2.0),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_likelihoods_masks_and_weights(likelihood: likelihoods.Likelihood, kind: str) -> None:
    model, weights, data = problem(*network("mlp"), likelihood, weight=True, mask=True)
    weights = {name: value + 0.3 if name in model.likelihood_names else value for name, value in weights.items()}
    vectors = directions(model, weights)
    found = PRODUCTS[kind](model, weights, data, vectors)
    compare(model, weights, data, kind, found, vectors)
    for name in model.likelihood_names:  # held fixed
        assert found[name].shape == vectors[name].shape
        assert not found[name].any()


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("chunk", [1, 3, 100, None])
def test_chunks_and_streams_add_up(kind: str, chunk: int | None) -> None:
    model, weights, data = problem(*network("mlp"), weight=True)
    vectors = directions(model, weights)
    batch = data.all()
    rows = [(batch.x[i], batch.y[i], batch.weight[i]) for i in range(N)]  # type: ignore[index]
    for source in (data, StreamData(rows, N, torch.float64, torch.device("cpu"))):
        found = PRODUCTS[kind](model, weights, source, vectors, chunk=chunk)  # type: ignore[arg-type]
        compare(model, weights, data, kind, found, vectors)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_only_random_weights_vary(kind: str) -> None:
    model, weights, data = problem(*network("mlp"), where="last")
    assert moving(model) == ["2.weight", "2.bias"]
    vectors = directions(model, weights)
    compare(model, weights, data, kind, PRODUCTS[kind](model, weights, data, vectors), vectors)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_one_output_without_an_axis(kind: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    batch = Batch(randn(N, 3), randn(N, seed=1))
    model = Model.build(net, likelihoods.StudentT(), priors.Gaussian(), batch, num_data=N)
    weights, data, vectors = model.initial, ArrayData(batch, N), directions(model, model.initial)
    found = PRODUCTS[kind](model, weights, data, vectors)
    point, back = in_one_vector(model, weights)
    if kind == "hessian":
        matrix = torch.func.hessian(lambda v: -model.log_likelihood(back(v), batch).sum())(point)
    else:
        jacobian = torch.func.jacrev(lambda v: model.outputs(back(v), batch.x))(point)
        score = losses.gradient(model.likelihood, model.outputs(weights, batch.x), batch.y, model.noise(weights))
        middle = score.square() if kind == "empirical" else torch.full((N,), 5 / 7, dtype=torch.float64)
        matrix = jacobian.T @ (middle[:, None] * jacobian)
    torch.testing.assert_close(flatten(select(found, moving(model)), 1), flatten(select(vectors, moving(model)), 1) @ matrix)


def test_dense_outputs() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double()
    y = torch.randint(3, (N, 2, 2), generator=torch.Generator().manual_seed(1))
    batch = Batch(randn(N, 1, 2, 2), y, None, torch.rand(y.shape, generator=torch.Generator().manual_seed(2)) < 0.7)
    move = lambda f: f.movedim(1, -1)  # noqa: E731
    model = Model.build(net, likelihoods.Categorical(), priors.Gaussian(), batch, num_data=N, output=move)
    vectors = directions(model, model.initial)
    ggn, hessian = (
        Product(model, model.initial, ArrayData(batch, N), kind)(vectors)
        for kind in ("ggn", "hessian")  # type: ignore[arg-type]
    )
    point, back = in_one_vector(model, model.initial)
    jacobian = torch.func.jacrev(lambda v: model.outputs(back(v), batch.x).reshape(N, -1))(point)
    fisher = losses.blocks(model.likelihood, model.outputs(model.initial, batch.x), {}, batch.mask)
    matrix = torch.einsum("nop,nok,nkq->pq", jacobian, fisher, jacobian)
    torch.testing.assert_close(flatten(ggn, 1), flatten(vectors, 1) @ matrix)
    whole = torch.func.hessian(lambda v: -model.log_likelihood(back(v), batch).sum())(point)
    torch.testing.assert_close(flatten(hessian, 1), flatten(vectors, 1) @ whole)


def test_the_gradient_of_the_log_joint_is_that_of_the_whole_data() -> None:
    model, weights, data = problem(*network("conv"), likelihoods.Gaussian(), weight=True)
    model = model.tempered(0.5)
    whole = model.gradient(model.initial, data.all(), buffers=model.buffers, train=False)
    for chunk in (None, 2):
        value, grads = log_joint_gradient(model, weights, data, chunk=chunk)
        torch.testing.assert_close(value, whole.value)
        assert set(grads) == set(model.initial)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole.grads[name])


def test_memory_is_asked_for_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2)).double()
    model, weights, data = problem(net, randn(N, 3))
    kept = activation_bytes(model, weights, data.all())
    assert kept == (50 + 2) * 8  # the result of tanh, and the outputs
    parameters = 3 * 50 + 50 + 50 * 2 + 2
    assert forecast_bytes(model, kept, 10, 4) == 3 * 10 * parameters * 8 + 4 * 22 * kept
    assert choose_chunk(model, weights, data, 10) == N
    for chunk in (1, 3):
        free = 2 * forecast_bytes(model, kept, 10, chunk) + 8
        monkeypatch.setattr("plausible.core.memory.available", lambda _, free=free: free)
        assert choose_chunk(model, weights, data, 10) == chunk
    monkeypatch.setattr("plausible.core.memory.available", lambda _: forecast_bytes(model, kept, 10, 1) - 1)
    with pytest.raises(MemoryError, match=r"with 10 vectors: about .* lower rank"):
        ggn_product(model, weights, data, directions(model, weights, 10))


def test_switches_of_pytorch_are_left_as_they_were() -> None:
    def switches() -> list[Any]:
        return [
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ]

    before = switches()
    model, weights, data = problem(*network("cubic"))
    ggn_product(model, weights, data, directions(model, weights))
    assert switches() == before


def test_bad_input_is_named() -> None:
    model, weights, data = problem(*network("mlp"))
    vectors = directions(model, weights)
    with pytest.raises(ValueError, match="kind must be one of 'ggn'"):
        Product(model, weights, data, "gauss-newton")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk must be a whole number of examples"):
        ggn_product(model, weights, data, vectors, chunk=0)
    with pytest.raises(ValueError, match="vectors must be named like the random weights"):
        ggn_product(model, weights, data, {"0.weight": vectors["0.weight"]})
    with pytest.raises(ValueError, match=r"vectors\['0.weight'\] must have shape \[V, \*weight.shape\]"):
        ggn_product(model, weights, data, tree_map(lambda v: v[0], vectors))
    with pytest.raises(ValueError, match="one V for all"):
        ggn_product(model, weights, data, {**vectors, "0.bias": vectors["0.bias"][:1]})


def test_linear_gaussian_curvature_is_the_scatter_of_the_inputs() -> None:
    net = nn.Linear(3, 1, bias=False).double()
    x, y = randn(N, 3), randn(N, 1, seed=1)
    model = Model.build(net, likelihoods.Gaussian(0.5), priors.Gaussian(), Batch(x, y), num_data=N)
    eye = {"weight": torch.eye(3, dtype=torch.float64)[:, None]}
    for product in (ggn_product, hessian_product):
        found = product(model, model.initial, ArrayData(Batch(x, y), N), eye)["weight"][:, 0]
        torch.testing.assert_close(found, x.T @ x / 0.25)
    residual = (y - net(x).detach()) / 0.25
    found = empirical_product(model, model.initial, ArrayData(Batch(x, y), N), eye)["weight"][:, 0]
    torch.testing.assert_close(found, (x * residual).T @ (x * residual))
    assert math.isclose(residual.abs().max().item(), 0.0) is False
