import math

import numpy as np
import pytest
import torch
from scipy import integrate

from plausible.apps.datasets import toys

Z = 5.0  # standard errors; about one false alarm in two million checks
N = 100_000


def close(values, expected, message=""):
    """The mean of independent values is as expected, up to Monte Carlo error."""
    values = values.double().flatten()
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - expected) < Z * error + 1e-7, f"{message}: {values.mean()} for {expected} ± {error}"


@pytest.mark.parametrize("name", ["blundell", "two_moons", "gap", "heteroscedastic"])
def test_a_seed_decides_everything_and_the_global_generator_is_left_alone(name):
    make = getattr(toys, name)
    before = torch.random.get_rng_state()
    x, y = make(50, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    again, other = make(50, seed=3), make(50, seed=4)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, other[0])
    assert len(x) == len(y) == 50
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="n must be a positive whole number"):
            make(bad)


@pytest.mark.parametrize(("name", "options"), [("blundell", {"low": -0.2, "high": 1.2}), ("gap", {}), ("heteroscedastic", {})])
def test_residuals_follow_the_stated_mean_and_noise(name, options):
    x, y = getattr(toys, name)(N, seed=1, **options)
    mean, std = toys.truth(name, x)
    scaled = (y - mean) / std
    for low, high in ((0, 0.3), (0.3, 0.7), (0.7, 1)):  # in parts, so that errors cannot cancel
        inside = (x >= x.quantile(low)) & (x <= x.quantile(high))
        close(scaled[inside], 0, f"{name} mean")
        close(scaled[inside] ** 2, 1, f"{name} variance")


def test_blundell_is_the_formula_of_the_paper():
    noise = 0.02
    x = torch.linspace(-0.2, 1.2, 15, dtype=torch.float64)
    damped = [math.exp(-0.5 * (k * math.pi * noise) ** 2) for k in (2, 4)]  # E exp(ikε) of a normal
    expected = x + 0.3 * damped[0] * (2 * math.pi * x).sin() + 0.3 * damped[1] * (4 * math.pi * x).sin()
    mean = toys.truth("blundell", x)[0]
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
    slope = 1 + 0.6 * math.pi * (2 * math.pi * x).cos() + 1.2 * math.pi * (4 * math.pi * x).cos()
    tiny = toys.truth("blundell", x, noise=1e-5)[1]  # to first order y moves by the slope with respect to ε
    torch.testing.assert_close(tiny, 1e-5 * slope.abs(), rtol=1e-3, atol=1e-9)
    x, y = toys.blundell(2000, noise=0.0, seed=2)
    exact = x + 0.3 * (2 * math.pi * x).sin() + 0.3 * (4 * math.pi * x).sin()
    torch.testing.assert_close(y, exact, rtol=0, atol=1e-6)
    assert 0 <= x.min() < 0.01
    assert 0.49 < x.max() <= 0.5
    with pytest.raises(ValueError, match="low must be below high"):
        toys.blundell(low=1.0, high=0.0)
    with pytest.raises(ValueError, match="noise must be a standard deviation"):
        toys.blundell(noise=-1.0)


def test_gap_has_no_inputs_in_the_gap_and_both_sides_alike():
    x, _ = toys.gap(N, seed=0)
    assert x.abs().min() >= 1
    assert x.abs().max() <= 3
    close((x > 0).float(), 0.5, "side")
    close(x.abs(), 2.0, "distance")
    close((x.abs() - 2) ** 2, 1 / 3, "spread")


def test_heteroscedastic_inputs_are_the_stated_mixture():
    x, _ = toys.heteroscedastic(N, seed=0)
    close(x, 0.0, "mean")
    close(x**2, (16 + 0.16 + 0.81 + 16 + 0.16) / 3, "second moment")
    near = x[x.abs() > 2.5].abs()  # the outer components, of which 4 sigma and more are inside
    close(near, 4.0, "outer components")


def test_two_moons_are_half_circles_with_noise():
    x, y = toys.two_moons(N + 1, noise=0.0, seed=0)
    assert int((y == 0).sum()) == N // 2 + 1
    upper, lower = x[y == 0], x[y == 1] - torch.tensor([1.0, 0.5])
    for moon, sign in ((upper, 1), (lower, -1)):
        torch.testing.assert_close(moon.norm(dim=1), torch.ones(len(moon)))
        assert (sign * moon[:, 1]).min() >= -1e-6
        close(moon[:, 0], 0.0, "angle")
        close(moon[:, 1], sign * 2 / math.pi, "angle")
    x, y = toys.two_moons(N, noise=0.3, seed=1)
    close(x[y == 0].norm(dim=1) ** 2, 1 + 2 * 0.09, "noise")
    first = toys.two_moons(200, seed=0)[1][:100]
    assert 20 < int(first.sum()) < 80  # shuffled


def test_tied_means_data_follow_the_model():
    problem = toys.tied_means(N, theta=(0.5, 2.0), seed=0)
    close(problem.x, 0.5 + 1.0, "mean")
    close((problem.x - 1.5) ** 2, 2 + 1.0, "variance")
    assert toys.tied_means().x.shape == (100,)


def test_tied_means_density_is_normalised_in_x_and_in_theta():
    theta = torch.tensor([0.3, -1.7], dtype=torch.float64)

    def likelihood(x):
        return toys.TiedMeans(torch.tensor([x], dtype=torch.float64)).log_likelihood(theta).exp().item()

    problem = toys.tied_means()
    assert integrate.quad(likelihood, -15, 15)[0] == pytest.approx(1, abs=1e-8)
    axis = torch.linspace(-40, 40, 4001, dtype=torch.float64)
    first = problem.log_prior(torch.stack([axis, torch.zeros_like(axis)], 1)).exp()
    second = problem.log_prior(torch.stack([torch.zeros_like(axis), axis], 1)).exp()
    joint = torch.trapezoid(first, axis) * torch.trapezoid(second, axis) / first[2000]
    assert joint.item() == pytest.approx(1, abs=1e-8)
    assert (torch.trapezoid(first * axis**2, axis) / torch.trapezoid(first, axis)).item() == pytest.approx(10, abs=1e-6)
    assert (torch.trapezoid(second * axis**2, axis) / torch.trapezoid(second, axis)).item() == pytest.approx(1)


def test_tied_means_log_prob_is_the_sum_written_out():
    problem = toys.tied_means(7, seed=5)
    theta = torch.tensor([[0.3, -1.7], [1.0, 0.5]], dtype=torch.float64)
    for row, value in zip(theta.tolist(), problem.log_prob(theta).tolist()):
        expected = math.log(math.exp(-(row[0] ** 2) / 20) / math.sqrt(20 * math.pi))
        expected += math.log(math.exp(-(row[1] ** 2) / 2) / math.sqrt(2 * math.pi))
        for x in problem.x.double().tolist():
            parts = [math.exp(-((x - centre) ** 2) / 4) for centre in (row[0], row[0] + row[1])]
            expected += math.log(0.5 * sum(parts) / math.sqrt(4 * math.pi))
        assert value == pytest.approx(expected, rel=1e-12)
    rows = torch.tensor([0, 3])
    left = torch.tensor([1, 2, 4, 5, 6])
    both = problem.log_likelihood(theta, rows) + problem.log_likelihood(theta, left)
    torch.testing.assert_close(both, problem.log_likelihood(theta))
    with pytest.raises(ValueError, match=r"theta must be a float tensor of shape \[..., 2\], got \[3\]"):
        problem.log_prob(torch.zeros(3))


def test_tied_means_exact_agrees_with_another_quadrature_and_sees_the_swap():
    problem = toys.tied_means()

    log_evidence, mean, covariance = problem.exact()
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(90))
    theta = torch.cartesian_prod(3 * nodes, 4 * nodes)  # Gauss-Legendre on [−3, 3] × [−4, 4]
    density = 12 * torch.outer(weights, weights).flatten() * (problem.log_prob(theta) - log_evidence).exp()
    assert density.sum().item() == pytest.approx(1, abs=1e-8)
    torch.testing.assert_close(density @ theta, mean, rtol=0, atol=1e-8)
    centred = theta - mean
    torch.testing.assert_close((density[:, None] * centred).T @ centred, covariance, rtol=0, atol=1e-8)
    # (θ₁, θ₂) → (θ₁+θ₂, −θ₂) exchanges the components: same likelihood, and a posterior with two modes
    theta = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    swapped = torch.stack([theta.sum(1), -theta[:, 1]], 1)
    torch.testing.assert_close(problem.log_likelihood(theta), problem.log_likelihood(swapped))
    assert torch.linalg.eigvalsh(covariance).min() > 0
    assert covariance[0, 1] < 0


def test_gaussian_grid_density_integrates_to_one_and_its_draws_have_its_moments():
    grid = toys.gaussians25()
    assert sorted({round(v, 6) for v in grid.means[:, 0].tolist()}) == [-4, -2, 0, 2, 4]
    assert grid.scale**2 == pytest.approx(0.03)
    axis = torch.linspace(-6, 6, 301, dtype=torch.float64)
    density = grid.log_prob(torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1)).exp()
    step = 12 / 300
    assert density.sum().item() * step**2 == pytest.approx(1, abs=1e-9)
    assert (density.sum(1) * axis**2).sum().item() * step**2 == pytest.approx(grid.variance, abs=1e-8)
    assert grid.variance == pytest.approx(8 + 0.03)
    draws = grid.sample(N, seed=0)
    close(draws[:, 0], 0.0, "mean")
    close(draws[:, 1] ** 2, grid.variance, "variance")
    close(draws.prod(1), 0.0, "covariance")
    entropy = -(density * density.clamp_min(1e-300).log()).sum().item() * step**2
    close(-grid.log_prob(draws.double()), entropy, "draws follow the density")
    nearest = torch.cdist(draws, grid.means).argmin(1)
    counts = torch.bincount(nearest, minlength=25).double()
    assert ((counts - N / 25) ** 2 / (N / 25)).sum() < 24 + Z * math.sqrt(48) + 10
    assert torch.equal(grid.sample(5, seed=1), grid.sample(5, seed=1))
    with pytest.raises(ValueError, match="z must be a float tensor"):
        grid.log_prob(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="spacing and scale positive"):
        toys.GaussianGrid(scale=0.0)


def test_grid_of_another_shape_is_checked_against_the_sum_written_out():
    grid = toys.GaussianGrid(side=2, spacing=3.0, scale=0.7)
    z = torch.tensor([0.4, -1.1], dtype=torch.float64)
    expected = 0.0
    for i in (-1.5, 1.5):
        for j in (-1.5, 1.5):
            distance = (0.4 - i) ** 2 + (-1.1 - j) ** 2
            expected += math.exp(-distance / (2 * 0.49)) / (2 * math.pi * 0.49) / 4
    assert grid.log_prob(z).item() == pytest.approx(math.log(expected), rel=1e-12)


def test_truth_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="name must be 'blundell'"):
        toys.truth("two_moons", torch.zeros(1))
    with pytest.raises(ValueError, match="noise is a function of x"):
        toys.truth("heteroscedastic", torch.zeros(1), noise=0.1)
    assert toys.truth("gap", torch.zeros(3), noise=0.0)[1].tolist() == [0, 0, 0]
