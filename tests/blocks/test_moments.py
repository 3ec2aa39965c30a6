"""Moments through layers and networks, and expected log-likelihoods: against closed forms, integration and Monte Carlo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

from plausible import likelihoods
from plausible.blocks.moments import (
    RULES,
    LogVarianceGaussian,
    Moments,
    Network,
    Weight,
    activated,
    chain,
    elementwise,
    expected_log_prob,
    expected_logsumexp,
    linear,
    propagate,
    rectified,
    scaled,
)
from plausible.blocks.moments.gaussians import activated_after_scale, along
from plausible.core.likelihoods import LOG_SCALE

DRAWS = 40_000
Z = 5.0


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def covariance(count: int, size: int) -> Tensor:
    root = normal(count, size, size)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=torch.float64)


def draws_of(moments: Moments, count: int = DRAWS) -> Tensor:
    """[S, N, D]."""
    root = torch.linalg.cholesky(moments.matrix)
    return moments.mean + (root @ normal(count, *moments.mean.shape, 1)).squeeze(-1)


def drawn(weight: Weight) -> Tensor:
    return weight.mean + weight.variance.sqrt() * normal(DRAWS, *weight.mean.shape)  # type: ignore[union-attr]


def agree(samples: Tensor, moments: Moments, slack: float = 0.0) -> None:
    """Mean and covariance of samples [S, N, D] within Z standard errors, and `slack` of the standard deviations."""
    count, centred = len(samples), samples - samples.mean(0)
    spread = samples.std(0)
    error = (samples.mean(0) - moments.mean).abs()
    assert bool((error <= Z * spread / math.sqrt(count) + slack * spread).all()), float((error / spread).max())
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)  # [S, N, D, D]
    scale = spread.unsqueeze(-1) * spread.unsqueeze(-2)
    error = (products.mean(0) - moments.matrix).abs()
    assert bool((error <= Z * products.std(0) / math.sqrt(count) + slack * scale).all()), float((error / scale).max())


# ---------------------------------------------------------------------------------------------------------------------
# Layers


@pytest.mark.parametrize("inputs", ["certain", "independent", "dependent"])
def test_linear_layers_are_exact(inputs: str) -> None:
    x = Moments(normal(2, 3), {"certain": None, "independent": normal(2, 3) ** 2, "dependent": covariance(2, 3)}[inputs])
    weight, bias = Weight(normal(4, 3), normal(4, 3) ** 2), Weight(normal(4), normal(4) ** 2)
    values = x.mean.expand(DRAWS, 2, 3) if inputs == "certain" else draws_of(x)
    out = torch.einsum("soi,sni->sno", drawn(weight), values) + drawn(bias).unsqueeze(1)
    agree(out, linear(x, weight, bias))
    if inputs != "dependent":
        torch.testing.assert_close(linear(x, weight, bias, full=False).variance, linear(x, weight, bias).variance)


def test_points_bring_no_variance() -> None:
    x, weight = Moments(normal(2, 3), covariance(2, 3)), normal(4, 3)
    found = linear(x, Weight(weight), Weight(normal(4)))
    torch.testing.assert_close(found.covariance, weight @ x.matrix @ weight.T)
    assert linear(Moments(x.mean), Weight(weight)).covariance is None


@pytest.mark.parametrize("inputs", ["certain", "independent", "dependent"])
def test_random_scales_and_shifts_are_exact(inputs: str) -> None:
    x = Moments(normal(2, 3), {"certain": None, "independent": normal(2, 3) ** 2, "dependent": covariance(2, 3)}[inputs])
    scale, shift = (Weight(normal(3), normal(3) ** 2) for _ in range(2))
    values = x.mean.expand(DRAWS, 2, 3) if inputs == "certain" else draws_of(x)
    agree(drawn(scale).unsqueeze(1) * values + drawn(shift).unsqueeze(1), scaled(x, scale, shift))


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def test_rectified_moments_have_their_published_values() -> None:
    found = rectified(torch.tensor([0.3, -1.2], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64), 0)
    torch.testing.assert_close(found.mean, torch.tensor([0.45710924, 0.15593537], dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(found.variance, torch.tensor([0.26034060, 0.18470562], dtype=torch.float64), rtol=0, atol=1e-8)


def test_rectified_moments_stay_right_far_from_zero() -> None:
    """In float32, where μ² + σ² minus μ² would have no digits left."""
    mean = torch.tensor([3000.0, 30.0, 0.0, -30.0, -3000.0, 1.0, -1.0], requires_grad=True)
    variance = torch.tensor([0.01, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0], requires_grad=True)
    found = rectified(mean, variance, 4)
    half = 0.01 * (0.5 - 0.5 / math.pi)
    torch.testing.assert_close(found.variance.detach(), torch.tensor([0.01, 0.01, half, 0.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(found.mean.detach(), torch.tensor([3000, 30, 0.1 / math.sqrt(2 * math.pi), 0, 0, 1, 0]))
    (found.mean.sum() + found.variance.sum() + sum(c.sum() for c in found.coefficients)).backward()
    assert bool(torch.isfinite(mean.grad).all())  # type: ignore[arg-type]
    assert bool(torch.isfinite(variance.grad).all())  # type: ignore[arg-type]


MODULES = [nn.ReLU(), nn.LeakyReLU(0.2), nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.SiLU(), nn.Softplus(), nn.ELU()]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_activations_against_dense_integration(module: nn.Module) -> None:
    """Mean, variance and Hermite coefficients by the trapezoidal rule on 20,001 points."""
    mean, variance = (
        torch.tensor([[0.4, -1.3, 2.0]], dtype=torch.float64),
        torch.tensor([[0.7, 1.5, 0.05]], dtype=torch.float64),
    )
    terms = 5
    found = RULES[type(module)](module, mean, variance, terms)
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    value = module(mean + variance.sqrt() * z[:, None, None]).squeeze(1)  # [points, 3]
    exact = (density[:, None] * value).sum(0)
    smooth = 2e-3 if isinstance(module, nn.ELU) else 1e-5  # a kink in the second derivative costs the quadrature digits
    torch.testing.assert_close(found.mean[0], exact, rtol=smooth, atol=smooth)
    torch.testing.assert_close(found.variance[0], (density[:, None] * (value - exact) ** 2).sum(0), rtol=smooth, atol=smooth)
    for k, c in enumerate(found.coefficients, start=1):
        he = torch.from_numpy(np.polynomial.hermite_e.hermeval(z.numpy(), [0] * k + [1]))
        wanted = (density[:, None] * he[:, None] * value).sum(0) / math.sqrt(math.factorial(k))
        torch.testing.assert_close(c[0], wanted, rtol=0, atol=5 * smooth)


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_quadrature_of_tanh_and_its_error(scale: float) -> None:
    """Exact to 1e-6 for deviations up to 1 and to 1e-3 at 3, where tanh is nearly a step."""
    found = RULES[nn.Tanh](
        nn.Tanh(), torch.tensor([0.5], dtype=torch.float64), torch.tensor([scale**2], dtype=torch.float64), 0
    )
    exact = integrate.quad(lambda z: math.tanh(0.5 + scale * z) ** 2 * stats.norm.pdf(z), -10, 10, limit=400)[0]
    second = float(found.variance + found.mean**2)
    assert second == pytest.approx(exact, abs=1e-6 if scale <= 1 else 1e-3)


def bivariate(module: nn.Module, mean: Tensor, matrix: Tensor) -> float:
    """Cov(φ(a), φ(b)) on a grid of 601² points."""
    z = torch.linspace(-8, 8, 601, dtype=torch.float64)
    mass = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    root = torch.linalg.cholesky(matrix)
    a = mean[0] + root[0, 0] * z[:, None] + 0 * z[None, :]
    b = mean[1] + root[1, 0] * z[:, None] + root[1, 1] * z[None, :]
    both = mass[:, None] * mass[None, :]
    first, second = module(a), module(b)
    return float((both * first * second).sum() - (both * first).sum() * (both * second).sum())


@pytest.mark.parametrize("module", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Tanh()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("correlation", [-0.9, -0.3, 0.6, 0.95])
def test_covariances_of_activations(module: nn.Module, correlation: float) -> None:
    """Four terms are right to 1 % of the standard deviations, and to 0.01 % for correlations below 0.3; more terms are better."""
    mean = torch.tensor([0.3, -0.4], dtype=torch.float64)
    matrix = torch.tensor([[0.8, correlation * 0.8], [correlation * 0.8, 0.8]], dtype=torch.float64)
    exact = bivariate(module, mean, matrix)
    errors = []
    for terms in (1, 4, 12):
        found = activated(module, Moments(mean[None], matrix[None]), terms).matrix[0]
        errors.append(abs(float(found[0, 1]) - exact) / float(found.diagonal().prod().sqrt()))
    assert errors[1] < (1e-4 if abs(correlation) <= 0.3 else 0.012)
    assert errors[2] < 2e-3
    assert errors[2] <= errors[1] + 1e-5 <= errors[0] + 2e-5


@pytest.mark.parametrize("terms", [1, 2, 3, 6])
def test_propagated_covariances_are_covariances(terms: int) -> None:
    """No negative eigenvalue, also where elements are almost copies of each other."""
    root = normal(5, 12, 3)
    a = Moments(normal(5, 12), root @ root.mT + 1e-9 * torch.eye(12, dtype=torch.float64))
    for module in (nn.ReLU(), nn.Tanh()):
        found = activated(module, a, terms)
        assert float(torch.linalg.eigvalsh(found.matrix).min()) > -1e-9
        torch.testing.assert_close(found.variance, RULES[type(module)](module, a.mean, a.variance, 0).variance)


def test_a_random_scale_before_an_activation() -> None:
    a = Moments(normal(2, 3), normal(2, 3) ** 2)
    scale, shift = Weight(normal(3), 0.3 * torch.ones(3).double()), Weight(normal(3), 0.2 * torch.ones(3).double())
    for module in (nn.Tanh(), nn.ReLU()):
        values = module(drawn(scale).unsqueeze(1) * draws_of(a) + drawn(shift).unsqueeze(1))
        found = activated_after_scale(module, a, scale, shift)
        error = (values.mean(0) - found.mean).abs()
        assert bool((error < Z * values.std(0) / math.sqrt(DRAWS)).all())
        square = (values - values.mean(0)) ** 2
        error = (square.mean(0) - found.variance).abs()
        assert bool((error < Z * square.std(0) / math.sqrt(DRAWS) + 2e-3).all())


def test_an_activation_of_ones_own() -> None:
    """E erf(a) = erf(μ/√(1 + 2σ²))."""

    @elementwise
    class Erf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    try:
        found = activated(
            Erf(), Moments(torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([[0.6]], dtype=torch.float64)), 1
        )
        assert float(found.mean) == pytest.approx(math.erf(0.4 / math.sqrt(2.2)), abs=1e-8)
        assert len(chain(nn.Sequential(nn.Linear(1, 2), Erf(), nn.Linear(2, 1)), "DVI")) == 3
    finally:
        del RULES[Erf]
    with pytest.raises(TypeError, match="elementwise"):
        elementwise(torch.erf)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Networks


def gaussian_network(net: nn.Module, scale: float) -> tuple[Network, Any]:
    """The network with weights around its own, and a function that gives outputs of draws, [S, N, O]."""
    means = {name: p.detach() for name, p in net.named_parameters()}
    network = Network(chain(net, "test"), means, {n: torch.full_like(m, scale**2) for n, m in means.items()}, {})

    def outputs(x: Tensor, count: int) -> Tensor:
        stacked = {n: m + scale * normal(count, *m.shape) for n, m in means.items()}
        with torch.no_grad():
            return torch.func.vmap(lambda w: torch.func.functional_call(net, w, (x,)))(stacked)

    return network, outputs


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("depth", [1, 2])
def test_moments_of_networks_against_monte_carlo(depth: int, activation: type[nn.Module]) -> None:
    """One hidden layer is exact. With two, pre-activations are sums of 20 terms and not quite Gaussian: 2 % of the deviations."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3, 20), activation()]
    for _ in range(depth - 1):
        layers += [nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), activation())]
    net = nn.Sequential(*layers, nn.Linear(20, 2)).double().eval()
    network, outputs = gaussian_network(net, 0.2)
    x = normal(4, 3)
    agree(outputs(x, 20_000), propagate(network, x, full=True, terms=4)[0], slack=0.0 if depth == 1 else 0.02)


def test_covariances_matter_in_the_second_layer() -> None:
    """Two outputs that share hidden units are dependent; without covariances they are not."""
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    network, outputs = gaussian_network(net, 0.1)
    x = normal(3, 2).abs()
    full, diagonal = (propagate(network, x, full=full, terms=4)[0] for full in (True, False))
    sampled = outputs(x, 20_000)
    agree(sampled, full, slack=0.02)
    assert bool((full.variance > 1.04 * diagonal.variance).all())
    torch.testing.assert_close(full.mean, diagonal.mean, rtol=0.05, atol=0)


def test_batch_norm_by_running_statistics_and_by_batches() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    net[1].running_mean.copy_(normal(5))
    net[1].running_var.copy_(normal(5) ** 2 + 0.5)
    network, outputs = gaussian_network(net, 0.2)
    x = normal(4, 3)
    agree(outputs(x, 20_000), propagate(network, x, full=True, terms=4)[0])
    points = network._replace(variances={})  # without variances it does what the module does, in training too
    before = {name: value.clone() for name, value in net.named_buffers()}
    found, moved = propagate(points, x, full=True, terms=4, train=True)
    torch.testing.assert_close(found.mean, net.train()(x))
    for name, value in net.named_buffers():
        torch.testing.assert_close(moved[name], value)
        assert not torch.equal(before[name], value)
    evaluated = points._replace(evaluated=("1",))
    assert propagate(evaluated, x, full=True, terms=4, train=True)[1] == {}


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), "the layer '1' is LayerNorm, through which no moments are known"),
        (nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 3))), r"'0\.0' is Conv2d"),
        (nn.LSTM(2, 3), "the network is LSTM"),
        (nn.Flatten(0), "Flatten"),
        (nn.BatchNorm1d(3, track_running_stats=False), "running statistics"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "ParametrizedLinear"),
    ],
)
def test_networks_without_moments_are_named(net: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain(net, "DVI")


def test_tied_layers_are_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2\.weight and 0\.weight are one weight used twice"):
        chain(nn.Sequential(layer, nn.Tanh(), layer), "DVI")


def test_inputs_that_are_no_vectors_are_refused() -> None:
    network = Network(chain(nn.Linear(3, 1), "DVI"), {}, {}, {})
    with pytest.raises(ValueError, match=r"put nn.Flatten\(\) before it"):
        propagate(network, torch.zeros(2, 4, 3), full=True, terms=1)
    with pytest.raises(ValueError, match="one input tensor"):
        propagate(network, {"a": torch.zeros(2, 3)}, full=True, terms=1)


# ---------------------------------------------------------------------------------------------------------------------
# Expected log-likelihoods

SCALAR, EACH = (
    Weight(torch.tensor(-0.3, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64)),
    Weight(torch.tensor([-0.3, 0.0, 0.4], dtype=torch.float64), torch.tensor([0.05, 0.1, 0.02], dtype=torch.float64)),
)
CASES: list[tuple[likelihoods.Likelihood, int, dict[str, Weight], str]] = [
    (likelihoods.Gaussian(scale=0.7), 3, {}, "real"),
    (likelihoods.Gaussian(scale=(0.7, 0.2, 1.0)), 3, {}, "real"),
    (likelihoods.Gaussian(), 3, {LOG_SCALE: SCALAR}, "real"),
    (likelihoods.Gaussian(), 3, {LOG_SCALE: Weight(SCALAR.mean)}, "real"),
    (likelihoods.Gaussian(scale="per-output"), 3, {LOG_SCALE: EACH}, "real"),
    (likelihoods.Scaled(likelihoods.Gaussian(), loc=(1.0, 0.0, 2.0), scale=3.0), 3, {LOG_SCALE: SCALAR}, "real"),
    (LogVarianceGaussian(), 6, {}, "real"),
    (likelihoods.HeteroscedasticGaussian(minimum=0.1), 6, {}, "real"),
    (likelihoods.StudentT(scale=0.5), 3, {}, "real"),
    (likelihoods.StudentT(), 3, {LOG_SCALE: SCALAR}, "real"),
    (likelihoods.StudentT(scale="per-output"), 3, {LOG_SCALE: EACH}, "real"),
    (likelihoods.Bernoulli(), 3, {}, "binary"),
    (likelihoods.Poisson(), 3, {}, "counts"),
    (likelihoods.NegativeBinomial(dispersion=2.0), 3, {}, "counts"),
    (likelihoods.Categorical(), 2, {}, "classes"),
]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {'points' * (not case[2])}")
def test_expected_log_likelihoods_against_monte_carlo(case: Any, full: bool) -> None:
    likelihood, outputs, noise, kind = case
    f = Moments(normal(4, outputs), 0.4 * covariance(4, outputs))
    f = f if full else Moments(f.mean, f.variance)
    targets = likelihood.target_shape((4, outputs))
    y = {
        "real": normal(*targets),
        "binary": normal(*targets).gt(0).double(),
        "counts": torch.randint(5, targets).double(),
        "classes": torch.randint(2, targets),
    }[kind]
    own = {n: w.mean.expand(DRAWS, *w.mean.shape) if w.variance is None else drawn(w) for n, w in noise.items()}
    values = likelihood.log_prob(draws_of(f), y, own)
    found = expected_log_prob(likelihood, f, y, noise)
    assert found.shape == y.shape
    z = (values.mean(0) - found).abs() / (values.std(0) / math.sqrt(DRAWS))
    assert float(z.max()) < Z


def test_the_closed_form_of_input_dependent_noise() -> None:
    """Against integration over both outputs, and the formula as it is printed."""
    f = Moments(torch.tensor([[0.3, -0.8]], dtype=torch.float64), torch.tensor([[[0.5, 0.2], [0.2, 0.3]]], dtype=torch.float64))
    y = torch.tensor([[1.1]], dtype=torch.float64)
    found = float(expected_log_prob(LogVarianceGaussian(), f, y, {}))
    grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
    z = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)
    mean, log_variance = (f.mean[0] + z @ torch.linalg.cholesky(f.matrix[0]).T).unbind(-1)
    density = torch.exp(-0.5 * z.square().sum(-1)) / (2 * math.pi) * 0.04**2
    exact = float((density * torch.distributions.Normal(mean, (0.5 * log_variance).exp()).log_prob(y)).sum())
    assert found == pytest.approx(exact, abs=1e-9)
    printed = -0.5 * (math.log(2 * math.pi) - 0.8 + (0.5 + (0.3 - 0.2 - 1.1) ** 2) / math.exp(-0.8 - 0.15))
    assert found == pytest.approx(printed, abs=1e-12)


@pytest.mark.parametrize(("scale", "gap"), [(0.1, 1e-3), (0.5, 0.01), (1.0, 0.15), (3.0, math.inf)])
@pytest.mark.parametrize("classes", [3, 10])
def test_the_bound_for_several_classes(classes: int, scale: float, gap: float) -> None:
    """Never below E log Σ e^f, and close to it for moderate covariances."""
    matrix = covariance(20, classes)
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    f = Moments(2 * normal(20, classes), scale**2 * matrix / largest)  # no standard deviation above `scale`
    for moments in (f, Moments(f.mean, f.variance)):
        values = draws_of(moments, 20_000).logsumexp(-1)
        error = Z * values.std(0) / math.sqrt(len(values))
        excess = expected_logsumexp(moments) - values.mean(0)
        assert bool((excess > -error).all())
        assert bool((excess < gap + error).all())
    y = torch.randint(classes, (20,))
    expected = f.mean[torch.arange(20), y] - expected_logsumexp(f)
    torch.testing.assert_close(expected_log_prob(likelihoods.Categorical(), f, y, {}), expected)
    torch.testing.assert_close(expected_logsumexp(Moments(f.mean)), f.mean.logsumexp(-1))


def test_a_likelihood_without_a_rule_is_named() -> None:
    class Halved(likelihoods.HeteroscedasticGaussian):
        pass

    class Strange(likelihoods.Bernoulli):
        def target_shape(self, outputs_shape: Any) -> tuple[int, ...]:
            return (*outputs_shape[:-1], 1)

    f = Moments(normal(4, 2), None)
    assert expected_log_prob(Halved(), f, normal(4, 1), {}).shape == (4, 1)
    with pytest.raises(ValueError, match="no expected log-likelihood is known for Strange"):
        expected_log_prob(Strange(), f, torch.ones(4, 1).double(), {})
    with pytest.raises(ValueError, match=r"\[N, 2K\], K means and then K log variances"):
        LogVarianceGaussian().target_shape((4, 3))


def test_nodes_sum_to_moments_of_the_normal_law() -> None:
    points, weight = along((torch.tensor([1.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.float64)))
    few, light = along((torch.ones(1, dtype=torch.float64), torch.full((1,), 4.0, dtype=torch.float64)), 10)
    for power in range(6):
        exact = stats.norm(1.0, 2.0).moment(power) if power else 1.0
        assert float((weight * points**power).sum()) == pytest.approx(exact, rel=1e-5)
        assert float((light * few**power).sum()) == pytest.approx(exact, rel=1e-10)
