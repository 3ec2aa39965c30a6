"""Weights that are distributions: the law of each estimator, in every kind of module.

Tolerances are Z standard errors of the Monte Carlo means compared. A test makes at most some hundreds of comparisons, each of which
fails by chance with probability 6·10⁻⁷.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from plausible.blocks import stochastic as st
from plausible.core import random
from plausible.core.networks import slots

Z = 5.0
DTYPE = torch.float64
RANDOM = pytest.mark.parametrize("estimator", st.ESTIMATORS)


class Bare(nn.Module):
    """Arithmetic on parameters, also inside a dictionary of keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(input=torch.tanh(x @ self.matrix), other=self.shift)


class Recurrent(nn.Module):
    """A recurrent layer and its outputs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(3, 2, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Cell(nn.Module):
    """A recurrent cell, called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 2, dtype=x.dtype)
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


class Tied(nn.Module):
    """An embedding whose weights are the last layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 5)
        self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.embedding(x))))


class Loop(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Product(torch.autograd.Function):
    """A linear operation that autograd sees as one function of its own."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.T @ x


class Custom(nn.Module):
    """A parameter that a custom autograd function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.w)


class Peek(nn.Module):
    """A parameter that is first looked at without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.layer.weight.abs().max()
        return self.layer(x) / size


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens() -> Tensor:
    return torch.tensor([0, 3, 1, 4, 2])


# Layers that are one linear operation: what the estimators are for.
LINEAR: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 4), rows(5, 3)),
    "linear, no bias": (lambda: nn.Linear(3, 4, bias=False), rows(5, 3)),
    "linear, one example": (lambda: nn.Linear(3, 4), rows(3)),
    "linear, sequences": (lambda: nn.Linear(3, 2), rows(2, 4, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), rows(2, 4, 7)),
    "conv1d, one example": (lambda: nn.Conv1d(4, 2, 3), rows(4, 5)),
    "conv1d, same": (lambda: nn.Conv1d(2, 2, 3, padding="same", padding_mode="reflect"), rows(2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), dilation=(2, 1), padding=(2, 1), padding_mode="circular"), rows(2, 2, 4, 3)),
    "conv2d, depthwise": (lambda: nn.Conv2d(2, 4, 2, groups=2, bias=False), rows(2, 2, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1, padding_mode="replicate"), rows(2, 2, 3, 2, 2)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1, groups=2), rows(2, 4, 3)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=3, output_padding=2, padding=1), rows(2, 2, 2, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, output_padding=1, dilation=2), rows(1, 2, 1, 2, 1)),
}

# Anything else.
OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding": (lambda: nn.Embedding(5, 3), tokens),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3, mode="sum"), lambda: tokens().view(1, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), rows(3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), rows(3, 4, 2)),
    "batch norm": (lambda: nn.BatchNorm1d(4), rows(6, 4)),
    "prelu": (lambda: nn.PReLU(3), rows(6, 3)),
    "bilinear": (lambda: nn.Sequential(nn.Linear(3, 3), Twice(nn.Bilinear(3, 3, 2))), rows(4, 3)),
    "lstm": (lambda: Recurrent(nn.LSTM), rows(2, 3, 3)),
    "gru": (lambda: Recurrent(nn.GRU), rows(2, 3, 3)),
    "cell": (Cell, rows(4, 3, 3)),
    "attention": (Attention, rows(2, 3, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), rows(2, 3, 4)),
    "transformer, norm first": (
        lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, norm_first=True),
        rows(2, 3, 4),
    ),
    "bare": (Bare, rows(5, 3)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), rows(5, 3)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), rows(5, 3)),
    "tied": (Tied, tokens),
    "loop": (Loop, rows(5, 3)),
    "custom": (Custom, rows(5, 3)),
    "peek": (Peek, rows(5, 3)),
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), rows(3, 3)),
    "network": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)
        ),
        rows(3, 1, 4, 4),
    ),
}
ALL = {**LINEAR, **OTHERS}


class Twice(nn.Module):
    """b(x, x)."""

    def __init__(self, form: nn.Module) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


def made(kind: str, train: bool = False) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """A module in double precision with parameters away from 0 and 1, an input, and the parameters by name."""
    with random.isolated(0):
        module, x = ALL[kind][0]().to(DTYPE).train(train), ALL[kind][1]()
        x = x.to(DTYPE) if x.is_floating_point() else x
        means = {name: 0.6 * torch.randn_like(p) for name, p in module.named_parameters()}
    return module, x, means


def widths(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scales between 0.1 and 0.5, all different."""
    numbers = random.uniform(random.key(5), 0, means)
    return {name: 0.1 + 0.4 * number for name, number in numbers.items()}


def functional(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(module, dict(weights), (x,))


def in_place(module: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The module with the weights in the places of its parameters, put back afterwards."""
    places = [(place, weights[name]) for name, found in slots(module).items() if name in weights for place in found]
    kept = [holder[name] for (holder, name), _ in places]
    try:
        for (holder, name), weight in places:
            holder[name] = weight
        return module(x)
    finally:
        for ((holder, name), _), value in zip(places, kept):
            holder[name] = value


def ways_of(module: nn.Module, means: Mapping[str, Tensor], x: Tensor, estimator: str) -> dict[str, str]:
    return st.survey(lambda weights: functional(module, weights, x), means, estimator)


def outputs(module: nn.Module, x: Tensor, means: Any, scales: Any, ways: Any, counter: int, call: Any = functional) -> Tensor:
    return call(module, st.gaussians(means, scales, st.Noise(random.key(3), counter), ways), x)


def draws(module: nn.Module, x: Tensor, means: Any, scales: Any, ways: Any, count: int, seed: int = 0) -> Tensor:
    """Outputs with `count` keys, by vmap: [count, …]."""
    keys = random.fold(random.key(seed), torch.arange(count))

    def one(key: Tensor) -> Tensor:
        return functional(module, st.gaussians(means, scales, st.Noise(key, 0), ways), x)

    return torch.func.vmap(one)(keys)


def assert_mean(found: Tensor, expected: Tensor, what: str = "") -> None:
    """The mean over the first axis is as expected, up to Z standard errors."""
    error = found.std(0) / len(found) ** 0.5
    worst = ((found.mean(0) - expected).abs() / (error + 1e-12)).max().item()
    assert worst < Z, f"{what} {worst:.1f} standard errors from what was expected"


# Exactness and completeness, for every module


@RANDOM
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", ALL)
def test_zero_scale_is_the_network_at_its_means(kind: str, train: bool, estimator: str) -> None:
    module, x, means = made(kind, train)
    zeros = {name: torch.zeros_like(mean) for name, mean in means.items()}
    ways = ways_of(copy.deepcopy(module).eval(), means, x, estimator)
    for call in (functional, in_place):
        expected = call(copy.deepcopy(module), means, x)
        found = outputs(copy.deepcopy(module), x, means, zeros, ways, 0, call)
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@RANDOM
@pytest.mark.parametrize("kind", ALL)
def test_no_weight_is_silently_deterministic(kind: str, estimator: str) -> None:
    module, x, means = made(kind)
    scales = widths(means)
    expected = functional(module, means, x)
    surveyed = (ways_of(module, means, x, estimator), in_place)
    unsurveyed = (dict.fromkeys(means, estimator), functional)
    for ways, call in (surveyed,) if kind in ("tied", "loop") else (surveyed, unsurveyed):
        for name in means:
            alone = {n: s if n == name else torch.zeros_like(s) for n, s in scales.items()}
            found = outputs(module, x, means, alone, ways, 0, call)
            assert torch.isfinite(found).all()
            assert (found - expected).abs().max() > 1e-3, f"{name} has no noise ({ways[name]})"


@RANDOM
@pytest.mark.parametrize("kind", ALL)
def test_gradients_reach_every_mean_and_scale(kind: str, estimator: str) -> None:
    module, x, means = made(kind)
    ways = ways_of(module, means, x, estimator)
    leaves = [{n: t.clone().requires_grad_() for n, t in tree.items()} for tree in (means, widths(means))]
    direction = torch.randn(functional(module, means, x).shape, dtype=DTYPE, generator=random.generator(1))
    value = (outputs(module, x, *leaves, ways, 2, in_place) * direction).sum()
    by_leaves = torch.autograd.grad(value, [*leaves[0].values(), *leaves[1].values()])
    assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in by_leaves)
    pair = torch.func.grad(lambda m, s: (outputs(module, x, m, s, ways, 2) * direction).sum(), (0, 1))(means, widths(means))
    for left, right in zip(by_leaves, [*pair[0].values(), *pair[1].values()]):
        torch.testing.assert_close(left, right)


# The law, where it is known


@RANDOM
@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, "both") for kind in LINEAR]
    + [(kind, part) for kind in ("linear", "conv2d", "transposed 2d") for part in ("weight", "bias")],
)
def test_linear_operations_have_their_mean_and_variance(kind: str, part: str, estimator: str) -> None:
    """E = op(x, μ), Var = op(x², σ²), by the module itself at those weights."""
    module, x, means = made(kind)
    scales = {name: s if part in ("both", name) else torch.zeros_like(s) for name, s in widths(means).items()}
    mean = functional(module, means, x)
    variance = functional(module, {name: s**2 for name, s in scales.items()}, x**2)
    plain = {name: mean for name, mean in means.items() if part not in ("both", name)}

    def one(key: Tensor) -> Tensor:
        noise = st.Noise(key, 0)
        weights = {n: plain[n] if n in plain else st.gaussian(means[n], scales[n], noise, estimator, n) for n in means}
        return functional(module, weights, x)

    found = torch.func.vmap(one)(random.fold(random.key(8), torch.arange(3000)))
    assert_mean(found, mean, "the mean is")
    assert_mean((found - mean) ** 2, variance, "the variance is")
    fourth = (found - mean) ** 4 / (3 * variance**2 + 1e-300)  # of a normal: 3 Var²
    if (variance > 0).all():
        assert_mean(fourth, torch.ones_like(mean), "the fourth moment is")


@RANDOM
def test_covariance_between_examples(estimator: str) -> None:
    """Cov(y_i, y_j) = Σ x_i x_j σ² + σ_b² for sampled weights, 0 for local noise and flipout."""
    module, x, means = made("linear")
    scales = widths(means)
    centred = draws(module, x, means, scales, estimator, 4000) - functional(module, means, x)
    shared = torch.einsum("ik,jk,ok->ijo", x, x, scales["weight"] ** 2) + scales["bias"] ** 2
    apart = ~torch.eye(len(x), dtype=torch.bool)
    expected = shared[apart] if estimator == "weights" else torch.zeros_like(shared[apart])
    assert_mean(torch.einsum("sio,sjo->sijo", centred, centred)[:, apart], expected)
    channels = torch.einsum("sio,sip->siop", centred, centred)[..., ~torch.eye(4, dtype=torch.bool)]
    assert_mean(channels, torch.zeros_like(channels[0]))


@RANDOM
def test_covariance_within_one_example(estimator: str) -> None:
    """A sequence sees one draw of the weights by flipout, and one for each element by local noise."""
    module, x, means = made("linear, sequences")
    scales = widths(means)
    centred = draws(module, x, means, scales, estimator, 4000) - functional(module, means, x)
    shared = torch.einsum("btk,buk,ok->btuo", x, x, scales["weight"] ** 2) + scales["bias"] ** 2
    apart = ~torch.eye(x.shape[1], dtype=torch.bool)
    expected = torch.zeros_like(shared[:, apart]) if estimator == "local" else shared[:, apart]
    assert_mean(torch.einsum("sbto,sbuo->sbtuo", centred, centred)[:, :, apart], expected)
    across = torch.einsum("sto,suo->stuo", centred[:, 0], centred[:, 1])
    between = torch.einsum("tk,uk,ok->tuo", x[0], x[1], scales["weight"] ** 2) + scales["bias"] ** 2
    assert_mean(across, between if estimator == "weights" else torch.zeros_like(between))


def test_flipout_changes_the_signs_of_inputs_and_of_outputs() -> None:
    """Fourth moments across two examples (x = 1): E y_o y_p y'_o y'_p = 0 by s_out; E y² y'² = (Σσ²)² + 2 Σσ⁴ by s_in."""
    module, _, means = made("linear, no bias")
    x, scale = torch.ones(2, 3, dtype=DTYPE), widths(means)["weight"]
    y = draws(module, x, {"weight": torch.zeros_like(scale)}, {"weight": scale}, "flipout", 6000)
    assert_mean(y[:, 0, 0] * y[:, 0, 1] * y[:, 1, 0] * y[:, 1, 1], torch.zeros((), dtype=DTYPE))
    assert_mean(y[:, 0] ** 2 * y[:, 1] ** 2, (scale**2).sum(1) ** 2 + 2 * (scale**4).sum(1))


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [
        (kind, estimator)
        for kind in ("embedding", "group norm", "batch norm", "mlp", "attention", "transformer", "tied", "loop")
        for estimator in ("local", "flipout")
    ]
    + [("network", "flipout")],
)
def test_networks_have_the_moments_of_weight_sampling(kind: str, estimator: str) -> None:
    """Each example sees the law of the network with sampled weights, after all layers.

    Not so for local noise behind a convolution, whose outputs at two places share weights: it has the moments of each of them only.
    """
    module, x, means = made(kind)
    scales = widths(means)
    ways = ways_of(module, means, x, estimator)
    found = draws(module, x, means, scales, ways, 2000, seed=1)
    sampled = draws(module, x, means, scales, "weights", 2000, seed=2)
    centre = sampled.mean(0)
    for moment in (lambda y: y, lambda y: (y - centre) ** 2):
        one, two = moment(found), moment(sampled)
        error = (one.var(0) / len(one) + two.var(0) / len(two)).sqrt()
        assert ((one.mean(0) - two.mean(0)).abs() / (error + 1e-12)).max() < Z


@RANDOM
@pytest.mark.parametrize("kind", ["linear", "linear, sequences", "conv2d", "transposed 1d"])
def test_gradients_have_the_right_expectation(kind: str, estimator: str) -> None:
    """E ∇ Σ c y² = ∇ Σ c (op(x, μ)² + op(x², σ²)), for μ and σ."""
    module, x, means = made(kind)
    scales = widths(means)
    c = torch.rand(functional(module, means, x).shape, dtype=DTYPE, generator=random.generator(2))

    def expected(m: Any, s: Any) -> Tensor:
        return (c * (functional(module, m, x) ** 2 + functional(module, {n: v**2 for n, v in s.items()}, x**2))).sum()

    def estimate(m: Any, s: Any, key: Tensor) -> Tensor:
        return (c * functional(module, st.gaussians(m, s, st.Noise(key, 0), estimator), x) ** 2).sum()

    keys = random.fold(random.key(4), torch.arange(1500))
    found = torch.func.vmap(torch.func.grad(estimate, (0, 1)), (None, None, 0))(means, scales, keys)
    wanted = torch.func.grad(expected, (0, 1))(means, scales)
    for name in means:
        assert_mean(found[0][name], wanted[0][name], f"gradient of the mean of {name}")
        assert_mean(found[1][name], wanted[1][name], f"gradient of the scale of {name}")


def test_local_noise_lowers_the_variance_of_gradients() -> None:
    """The reason to use it, and flipout: batch gradients average over examples (Kingma et al., 2015, section 2.2)."""
    module, means = nn.Linear(3, 1).to(DTYPE), made("linear")[2]
    means = {name: mean[:1] for name, mean in means.items()}
    scales, x = widths(means), torch.randn(200, 3, dtype=DTYPE, generator=random.generator(0))

    def variance(estimator: str) -> float:
        def loss(m: Any, key: Tensor) -> Tensor:
            return (functional(module, st.gaussians(m, scales, st.Noise(key, 0), estimator), x) ** 2).mean()

        keys = random.fold(random.key(6), torch.arange(500))
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(means, keys)
        return grads["weight"].var(0).mean().item()

    assert variance("local") < 0.1 * variance("weights")
    assert variance("flipout") < 0.1 * variance("weights")


def test_gradients_are_finite_where_the_variance_is_zero() -> None:
    module, _, means = made("linear, no bias")
    for x, scale in ((torch.zeros(2, 3, dtype=DTYPE), 0.3), (torch.ones(2, 3, dtype=DTYPE), 0.0)):
        scales = {name: torch.full_like(mean, scale) for name, mean in means.items()}
        grads = torch.func.grad(lambda m, s, x=x: outputs(module, x, m, s, "local", 0).sum(), (0, 1))(means, scales)
        assert all(torch.isfinite(g["weight"]).all() for g in grads)


# One draw for all uses


def test_a_weight_that_is_used_twice_is_drawn_once() -> None:
    for kind, fallbacks in (("tied", {"embedding.weight"}), ("loop", {"layer.weight", "layer.bias"})):
        module, x, means = made(kind)
        for estimator in ("local", "flipout"):
            ways = ways_of(module, means, x, estimator)
            assert {name for name, way in ways.items() if way == st.FALLBACK} == fallbacks
            noise = st.Noise(random.key(0), 0)
            scales = {n: s if n in fallbacks else torch.zeros_like(s) for n, s in widths(means).items()}
            found = functional(module, st.gaussians(means, scales, noise, ways), x)
            assert set(noise.drawn) == fallbacks
            torch.testing.assert_close(found, functional(module, {**means, **noise.drawn}, x))


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_second_use_behind_local_noise_is_refused(estimator: str) -> None:
    module, x, means = made("loop")
    with pytest.raises(RuntimeError, match=r"'layer.weight' is used a second time .* stochastic.survey"):
        outputs(module, x, means, widths(means), estimator, 0)
    weight = st.gaussian(means["layer.weight"], means["layer.weight"].abs(), st.Noise(random.key(0), 0), estimator)
    F.linear(x, weight)
    with pytest.raises(RuntimeError, match="second time"):
        weight + 1


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_a_weight_that_was_sampled_stays_so(estimator: str) -> None:
    """Other uses before the linear one: all of them see the value drawn first, and the record says so."""
    _, x, means = made("linear")
    noise = st.Noise(random.key(0), 0)
    weight = st.gaussian(means["weight"], widths(means)["weight"], noise, estimator, "w")
    total = weight.sum()
    found = F.linear(x, weight) + F.linear(input=x, weight=weight)
    assert noise.record == {"w": st.FALLBACK}
    torch.testing.assert_close(total, noise.drawn["w"].sum())
    torch.testing.assert_close(found, 2 * x @ noise.drawn["w"].T)
    assert (noise.drawn["w"] != means["weight"]).all()


def test_the_record_says_how_noise_was_drawn() -> None:
    module, x, means = made("transformer")
    for estimator in ("local", "flipout"):
        noise = st.Noise(random.key(0), 0)
        functional(module, st.gaussians(means, widths(means), noise, estimator), x)
        ways = ways_of(module, means, x, estimator)
        assert noise.record == {name: estimator if way == "flipout" else way for name, way in ways.items()}
        assert {name for name, way in noise.record.items() if way == estimator} == {
            f"linear{i}.{part}" for i in (1, 2) for part in ("weight", "bias")
        }
    noise = st.Noise(random.key(0), 0)
    st.gaussians(means, widths(means), noise, "weights")
    assert set(noise.record.values()) == {"weights"}
    assert ways_of(module, means, x, "weights") == noise.record


def test_the_survey_sends_to_sampling_what_hides_its_operations() -> None:
    module, x, means = made("custom")
    assert ways_of(module, means, x, "local") == {"w": st.FALLBACK}
    module, x, means = made("peek")
    ways = {"layer.weight": st.FALLBACK, "layer.bias": "local"}
    assert ways_of(module, means, x, "local") == ways
    for chosen in (ways, "local"):  # drawn without gradients, used with them
        leaves = {name: mean.clone().requires_grad_() for name, mean in means.items()}
        value = outputs(module, x, leaves, widths(means), chosen, 0).sum()
        assert all(g.abs().max() > 0 for g in torch.autograd.grad(value, list(leaves.values())))
        with torch.no_grad():
            assert not outputs(module, x, leaves, widths(means), chosen, 0).requires_grad


def test_code_that_reads_the_storage_finds_no_mean() -> None:
    weight = st.gaussian(torch.ones(3), torch.zeros(3), st.Noise(random.key(0), 0), "local")
    with torch._C.DisableTorchFunctionSubclass():
        assert (weight + 0).isnan().all()


def test_it_looks_like_a_parameter() -> None:
    mean, scale = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3)
    weight = st.gaussian(mean, scale, st.Noise(random.key(0), 0), "local", "w")
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (2, 3)
    assert (weight.dtype, weight.device, weight.dim(), len(weight)) == (torch.float32, mean.device, 2, 2)
    assert weight.requires_grad
    assert weight.is_floating_point()
    assert torch.is_floating_point(weight)
    assert "'w'" in repr(weight)
    assert weight._noise.record == {}, "nothing of this uses its value"
    module = nn.Linear(3, 2)
    module.weight = weight  # an assignment that checks for parameters
    module(torch.ones(1, 3))
    assert weight._noise.record == {"w": "local"}
    other = st.gaussian(mean, scale, noise := st.Noise(random.key(0), 0), "local", "w")
    for value in (other.detach(), other.data, other + 0, other.T.T, torch.stack([other, other])[1], other.clone()):
        torch.testing.assert_close(value.detach(), noise.drawn["w"].detach())
    assert not other.detach().requires_grad


# Noise


@RANDOM
def test_noise_is_a_function_of_key_counter_and_name(estimator: str) -> None:
    module, x, means = made("mlp")
    scales = widths(means)

    def run(seed: int = 0, counter: Any = 0, rename: str = "", backwards: bool = False) -> Tensor:
        noise = st.Noise(random.key(seed), counter)
        order = sorted(means, reverse=backwards)
        return functional(module, {n: st.gaussian(means[n], scales[n], noise, estimator, rename + n) for n in order}, x)

    assert torch.equal(run(), run(backwards=True))
    assert torch.equal(run(counter=7), run(counter=torch.tensor(7)))
    for other in (run(seed=1), run(counter=1), run(rename="other ")):
        assert ((other - run()).abs() > 1e-6).all()


@RANDOM
def test_stacked_members_have_their_own_noise(estimator: str) -> None:
    """Vmap over keys and weights equals the loop over members."""
    module, x, means = made("mlp")
    ways = ways_of(module, means, x, estimator)
    many = {name: torch.stack([mean, mean, 2 * mean]) for name, mean in means.items()}
    scales = {name: 0.3 * torch.ones_like(mean) for name, mean in many.items()}
    keys = random.fold(random.key(1), torch.arange(3))

    def one(m: Any, s: Any, key: Tensor) -> Tensor:
        ways = st.survey(lambda weights: functional(module, weights, x), m, estimator)
        return functional(module, st.gaussians(m, s, st.Noise(key, 5), ways), x).square().sum()

    value, grads = torch.func.vmap(torch.func.grad_and_value(one, (0, 1)))(many, scales, keys)[::-1]
    assert (value[0] - value[1]).abs() > 1e-3
    for i in range(3):
        alone = ({n: t[i] for n, t in tree.items()} for tree in (many, scales))
        expected = torch.func.grad_and_value(one, (0, 1))(*alone, keys[i])
        torch.testing.assert_close(value[i], expected[1])
        for name in means:
            torch.testing.assert_close(grads[1][name][i], expected[0][1][name])
    assert ways == ways_of(module, means, x, estimator)


def test_signs_are_fair() -> None:
    signs = st.Noise(random.key(0), 0).signs("w", [40000, 2], torch.ones((), dtype=DTYPE))
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert_mean(signs, torch.zeros(2, dtype=DTYPE))
    assert_mean(signs[:, 0] * signs[:, 1], torch.zeros((), dtype=DTYPE))


@RANDOM
def test_antithetic_pairs_average_to_the_mean(estimator: str) -> None:
    for kind in ("linear", "conv2d", "embedding"):
        module, x, means = made(kind)
        scales = widths(means)
        noises = st.Noise.several(random.key(0), 3, 5, antithetic=True)
        found = [functional(module, st.gaussians(means, scales, noise, estimator), x) for noise in noises]
        expected = functional(module, means, x)
        for i in range(2):  # of five, the third has no partner
            torch.testing.assert_close((found[i] + found[3 + i]) / 2, expected)
        assert len({y.sum().item() for y in found}) == 5
        plain = st.Noise.several(random.key(0), 3, 2)
        alone = functional(module, st.gaussians(means, scales, plain[1], estimator), x)
        torch.testing.assert_close(alone, found[1], rtol=0, atol=0)
    with pytest.raises(ValueError, match="antithetic=True"):
        st.Noise(random.key(0), 0).mirrored()
    with pytest.raises(ValueError, match="samples: got 0"):
        st.Noise.several(random.key(0), 0, 0)


def test_log_density_is_that_of_the_normal() -> None:
    _, _, means = made("mlp")
    scales = widths(means)
    noise = st.Noise(random.key(0), 0)
    draws = st.gaussians(means, scales, noise, "weights")
    assert all(draws[name] is noise.drawn[name] for name in means)
    expected = sum(torch.distributions.Normal(means[n], scales[n]).log_prob(draws[n]).sum() for n in means)
    torch.testing.assert_close(st.log_density(noise.drawn, means, scales), expected)
    torch.testing.assert_close(st.log_density(noise.drawn, means, scales, detached=True), expected)
    with pytest.raises(ValueError, match="draws: got none"):
        st.log_density({}, means, scales)


def test_sticking_the_landing() -> None:
    """The gradient of log q(w) − log p(w) is 0 where q = p, for each draw; and elsewhere it has the same expectation."""
    mean, scale = torch.tensor([0.3, -1.0], dtype=DTYPE), torch.tensor([0.5, 2.0], dtype=DTYPE)
    prior = torch.distributions.Normal(mean, scale)

    def gap(m: Tensor, s: Tensor, key: Tensor, detached: bool) -> Tensor:
        noise = st.Noise(key, 0)
        w = st.gaussian(m, s, noise, "weights", "w")
        return st.log_density(noise.drawn, {"w": m}, {"w": s}, detached=detached) - prior.log_prob(w).sum()

    keys = random.fold(random.key(2), torch.arange(4000))
    gradient = torch.func.grad(gap, (0, 1))
    exact = torch.func.vmap(lambda k: gradient(mean, scale, k, True))(keys[:20])
    assert all(g.abs().max() < 1e-12 for g in exact)
    naive = torch.func.vmap(lambda k: gradient(mean, scale, k, False))(keys[:20])
    assert max(g.abs().max() for g in naive) > 0.1
    m, s = mean + 0.4, scale * 0.7
    kl = torch.func.grad(lambda m, s: torch.distributions.kl_divergence(torch.distributions.Normal(m, s), prior).sum(), (0, 1))(
        m, s
    )
    for detached in (True, False):
        found = torch.func.vmap(lambda k, d=detached: gradient(m, s, k, d))(keys)
        assert_mean(found[0], kl[0], "mean")
        assert_mean(found[1], kl[1], "scale")


@RANDOM
def test_mixed_precision(estimator: str) -> None:
    module, x, means = made("mlp")
    module, x = module.float(), x.float()
    means = {name: mean.float() for name, mean in means.items()}
    for scale in (0.0, 0.3):
        scales = {name: torch.full_like(mean, scale) for name, mean in means.items()}
        with torch.autocast("cpu", torch.bfloat16):
            found = outputs(module, x, means, scales, estimator, 0)
            expected = functional(module, means, x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected) == (scale == 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m, n: st.gaussian(m, m, n, "flip"), "estimator: got 'flip', expected one of 'weights', 'local', 'flipout'"),
        (lambda m, n: st.gaussian(m, m[:1], n, "local"), r"scale of 'weight 0': got shape \(1, 3\)"),
        (lambda m, n: [st.gaussian(m, m, n, "local", "a") for _ in "ab"], "name: 'a' was given to two weights"),
        (lambda m, n: st.gaussian(m.long(), m.long(), n, "local"), "expected floating point"),
        (lambda m, n: st.survey(lambda w: None, {"a": m}, "other"), "estimator: got 'other'"),
        (lambda m, n: st.Noise(random.key(0).expand(4, 2), 0), r"key: got shape \(4, 2\).*vmap"),
    ],
)
def test_bad_input(wrong: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(torch.ones(2, 3), st.Noise(random.key(0), 0))


# Compiled


def step(module: nn.Module, x: Tensor, estimator: str, record: dict[str, str]) -> Callable[..., Any]:
    """Value and gradients of a pass with an antithetic partner, as one function of everything that changes."""

    def objective(m: Any, s: Any, key: Tensor, counter: Tensor) -> Tensor:
        ways = st.survey(lambda weights: functional(module, weights, x), m, estimator)
        total = x.new_zeros(())
        for noise in st.Noise.several(key, counter, 2, antithetic=True, record=record):
            total = total + functional(module, st.gaussians(m, s, noise, ways), x).square().sum()
        return total

    return torch.func.grad_and_value(objective, (0, 1))


def check_compiled(kind: str, estimator: str, backend: str, stacked: bool = False) -> None:
    """One graph gives what the eager pass gives, for one model or for stacked ones."""
    torch.compiler.reset()
    module, x, means = made(kind)
    scales, record = widths(means), {}
    run = step(module, x, estimator, record)
    counter, keys = torch.tensor(4), random.fold(random.key(3), torch.arange(2))
    if stacked:
        run = torch.func.vmap(run, (None, None, 0, None))
    key = keys if stacked else keys[0]
    expected = run(means, scales, key, counter)
    how = dict(record)
    record.clear()
    found = torch.compile(run, fullgraph=True, backend=backend)(means, scales, key, counter)
    assert record == how
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_traced_as_one_graph() -> None:
    check_compiled("mlp", "local", "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("kind", "estimator"), [("network", "flipout"), ("network", "local"), ("tied", "local"), ("attention", "weights")]
)
def test_networks_traced_as_one_graph(kind: str, estimator: str, stacked: bool) -> None:
    check_compiled(kind, estimator, "aot_eager", stacked)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_compiled(estimator: str, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    small = lambda: nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 1))  # noqa: E731
    monkeypatch.setitem(ALL, "small", (small, rows(3, 3)))
    check_compiled("small", estimator, "inductor")
