"""Fidelity: distances have their closed forms, the same law is at distance zero, known deficits are found exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import plausible as pl
from plausible import metrics
from plausible.analysis.fidelity import Fidelity, Measure, distances, regions, sides
from plausible.apps.cli import app
from plausible.blocks.chains import stein
from plausible.blocks.chains.density import FunctionDensity
from plausible.core import random
from plausible.core.model import Model
from plausible.core.storage import MemoryDraws
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.testing import LinearGaussian, Z

PROBLEM = LinearGaussian()


@pytest.fixture(scope="module")
def full() -> Posterior:
    """The exact posterior in closed form."""
    return PROBLEM.fit(pl.Laplace(structure="full", mode=pl.MAP.conforming()))


@pytest.fixture(scope="module")
def diagonal() -> Posterior:
    """N(m, diag(1/Λ_ii)): the mean-field optimum, in closed form."""
    return PROBLEM.fit(pl.Laplace(structure="diag", mode=pl.MAP.conforming()))


def data() -> tuple[Tensor, Tensor]:
    x, y, _ = PROBLEM.data()
    return x.float(), y.float()


def inputs(count: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=random.generator(seed, 301))


def drawn(model: Model, weights: Tensor, chains: int = 1) -> DrawsPosterior:
    """A posterior of these draws [S, 3] of the linear problem's weights."""
    return DrawsPosterior(pl.MAP(), model, {}, MemoryDraws({"weight": weights[:, None].float()}), chains)


def exact(model: Model, count: int, seed: int, chains: int = 1, shift: float = 0.0) -> DrawsPosterior:
    mean, covariance = PROBLEM.posterior()
    noise = torch.randn(count, 3, generator=random.generator(seed, 302), dtype=torch.float64)
    return drawn(model, mean + shift + noise @ torch.linalg.cholesky(covariance).T, chains)


# Distances


@pytest.mark.parametrize("counts", [(6, 6), (6, 4), (5, 7), (1, 9)])
def test_wasserstein_of_draws_is_that_of_their_steps(counts: tuple[int, int]) -> None:
    stream = random.generator(0, 303)
    first, second = (torch.randn(n, 3, generator=stream, dtype=torch.float64).sort(0).values for n in counts)
    common = math.lcm(*counts)  # every draw as often as makes both equally many
    alike = [side.repeat_interleave(common // len(side), 0) for side in (first, second)]
    expected = (alike[0] - alike[1]).square().mean(0)
    assert torch.allclose(distances.wasserstein_squared(first, second), expected, rtol=1e-12)


def test_wasserstein_to_a_gaussian_is_the_integral_over_its_quantiles() -> None:
    draws = torch.tensor([-1.3, 0.2, 0.4, 2.0], dtype=torch.float64)[:, None]
    mean, scale = torch.tensor([0.3], dtype=torch.float64), torch.tensor([1.7], dtype=torch.float64)
    levels = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    apart = draws[(levels * 4).long(), 0] - (mean + scale * torch.special.ndtri(levels))
    found = distances.wasserstein_squared_to_gaussian(draws, mean, scale)
    assert float(found) == pytest.approx(float(apart.square().mean()), rel=1e-4)
    many = (mean + scale * torch.special.ndtri(levels))[:, None]
    assert float(distances.wasserstein_squared_to_gaussian(many, mean, scale)) < 1e-4
    other = distances.gaussian_wasserstein_squared(mean, scale, mean + 3.0, scale + 4.0)
    assert float(other) == pytest.approx(25.0)
    far = distances.wasserstein_squared_to_gaussian(many, mean + 3.0, scale + 4.0)
    assert float(far) == pytest.approx(25.0, rel=1e-3)


def test_total_variation_of_gaussians_that_are_shifted_or_stretched() -> None:
    law = torch.distributions.Normal(torch.zeros(1, dtype=torch.float64), 1.0)
    quartiles = law.icdf(torch.tensor([[0.25], [0.5], [0.75]], dtype=torch.float64))
    for shift, scale in ((0.5, 1.0), (3.0, 1.0), (0.0, 2.0), (0.0, 0.05)):
        places = distances.places_between(quartiles, shift + scale * quartiles)
        first, second = law.cdf(places), law.cdf((places - shift) / scale)
        found = float(distances.total_variation_of_cells(first, second))
        cross = math.sqrt(2 * math.log(1 / scale) / (1 / scale**2 - 1)) if scale != 1 else 0.0  # where densities meet
        phi = lambda z: 0.5 * math.erf(z / math.sqrt(2))  # noqa: E731
        known = 2 * phi(shift / 2) if scale == 1 else 2 * abs(phi(cross) - phi(cross / scale))
        assert found <= known + 1e-12
        assert found == pytest.approx(known, abs=1.5e-3)


# Stein


def test_stein_kernel_of_two_points_by_hand() -> None:
    w, s, length = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([[1.0, 0.5], [-0.5, 2.0]]), 2.0
    base = 1 + 8 / 4  # ‖w − w′‖² = 8
    by_hand = (1 * -0.5 + 0.5 * 2) * base**-0.5 + (1.5 * -2 + -1.5 * 2) / 4 * base**-1.5 + 2 / 4 * base**-1.5
    by_hand -= 3 * 8 / 16 * base**-2.5
    found = stein.stein_matrix(w, s, length)
    assert float(found[0, 1]) == pytest.approx(by_hand)
    assert float(found[1, 0]) == pytest.approx(by_hand)
    assert float(found[0, 0]) == pytest.approx(1.25 + 2 / 4)
    value, _ = stein.discrepancy(found, torch.tensor([0, 1]))
    assert value == pytest.approx(by_hand)


def test_stein_kernel_is_that_of_its_definition() -> None:
    """By autograd on k(w, w′) itself."""
    stream = random.generator(0, 304)
    w, s = (torch.randn(2, 4, generator=stream, dtype=torch.float64) for _ in range(2))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (1 + (a - b).square().sum() / 1.5**2) ** -0.5

    first, second = torch.func.grad(kernel, 0)(*w), torch.func.grad(kernel, 1)(*w)
    trace = torch.func.jacrev(torch.func.grad(kernel, 0), 1)(*w).trace()
    expected = s[0] @ s[1] * kernel(*w) + s[0] @ second + s[1] @ first + trace
    assert float(stein.stein_matrix(w, s, 1.5)[0, 1]) == pytest.approx(float(expected), rel=1e-10)


def test_stein_discrepancy_tells_a_shifted_law_from_the_right_one() -> None:
    target = FunctionDensity(lambda q: -0.5 * (q.square() * torch.tensor([1.0, 4.0])).sum(-1), 2)
    q = torch.randn(600, 2, generator=random.generator(0, 305), dtype=torch.float64) / torch.tensor([1.0, 2.0])
    _, blocks = sides.divide(len(q), 1)
    found = {}
    for name, draws in {"right": q, "shifted": q + 0.5, "narrow": 0.5 * q}.items():
        matrix = stein.stein_matrix(draws, target.evaluate(draws).gradient, stein.median_length(q, blocks))
        found[name] = stein.discrepancy(matrix, blocks)
    value, error = found["right"]
    assert abs(value) < Z * error
    for name in ("shifted", "narrow"):
        assert found[name][0] > value + 2 * Z * error


def test_a_point_at_the_mode_has_a_discrepancy_of_one(full: Posterior) -> None:
    mean, _ = PROBLEM.posterior()
    point = drawn(full.model, mean[None])
    found = pl.fidelity(point, exact(full.model, 400, 0), inputs(), data=data())
    assert found.stein.value == pytest.approx(1.0, abs=1e-3)
    assert found.stein.error == 0


# The linear problem


def test_the_same_posterior_is_at_distance_zero(full: Posterior) -> None:
    same = exact(full.model, 400, 0, chains=4)
    found = pl.fidelity(same, same, inputs(), PROBLEM.noise * inputs()[:, :1], data=data())
    for name in ("total_variation", "wasserstein", "log_likelihood"):
        measure = getattr(found, name)
        assert measure.value == 0
        assert measure.floor is not None
        assert measure.floor != 0
        assert measure.at_floor
    assert [region.ratio.value for region in found.epistemic.values()] == [1.0] * len(found.epistemic)
    assert found.epistemic["inside"].difference == 0
    closed = pl.fidelity(full, full, inputs(), data=data())
    assert closed.wasserstein == Measure(0.0, 0.0, 0.0)
    assert closed.draws is None


def test_exact_draws_are_at_the_noise_floor_and_shifted_ones_are_not(full: Posterior) -> None:
    reference = exact(full.model, 2000, 0, chains=4)
    near = pl.fidelity(exact(full.model, 2000, 1), reference, inputs(), data=data())
    for name in ("wasserstein", "total_variation", "stein"):
        measure = near.measures[name]
        assert abs(measure.value - measure.ideal) < 3 * max(abs(measure.floor - measure.ideal), measure.error), name
    far = pl.fidelity(exact(full.model, 2000, 1, shift=0.3), reference, inputs(), data=data())
    for name in ("wasserstein", "total_variation", "stein"):
        assert far.measures[name].at_floor is False, name
        assert far.measures[name].value > 4 * max(near.measures[name].value, near.measures[name].error)


def test_the_deficit_of_mean_field_on_correlated_inputs_is_exact(full: Posterior, diagonal: Posterior) -> None:
    x, apart = inputs(), {"here": inputs(7, seed=1)}
    _, covariance = PROBLEM.posterior()
    narrow = 1 / PROBLEM.precision().diagonal()
    found = pl.fidelity(diagonal, full, x, regions=apart)
    there = apart["here"].double()
    mine, truth = there.square() @ narrow, ((there @ covariance) * there).sum(1)
    assert found.epistemic["here"].ratio.value == pytest.approx(float(mine.mean() / truth.mean()), rel=1e-4)
    assert found.epistemic["here"].difference == pytest.approx(float((mine - truth).mean()), rel=1e-3)
    spread, scale = (x.double().square() @ narrow).sqrt(), ((x.double() @ covariance) * x.double()).sum(1).sqrt()
    assert found.wasserstein.value == pytest.approx(float(((spread - scale).abs() / scale).mean()), rel=1e-3)
    assert found.wasserstein.error == 0


def test_draws_and_closed_forms_give_the_same_numbers(full: Posterior, diagonal: Posterior) -> None:
    x = inputs()
    y = (x.double() @ PROBLEM.posterior()[0])[:, None].float() + PROBLEM.noise * inputs(seed=2)[:, :1]
    known = pl.fidelity(diagonal, full, x, y, data=data())
    for pair in ((diagonal, exact(full.model, 4000, 3)), (diagonal.with_predictive("sampled"), full)):
        found = pl.fidelity(*pair, x, y, data=data())
        for name in ("total_variation", "log_likelihood", "epistemic.inside", "epistemic.outside", "stein"):
            one, two = found.measures[name], known.measures[name]
            assert abs(one.value - two.value) < Z * max(one.error, two.error) + 0.01, name
        assert found.wasserstein.value == pytest.approx(known.wasserstein.value, abs=Z * found.wasserstein.error + 0.03)


@pytest.mark.parametrize("lag", [1, 8])
def test_standard_errors_are_those_of_repetitions(lag: int) -> None:
    """Of 300 independent sets of draws, also of chains that stay where they are for `lag` steps."""
    stream = random.generator(0, 311)
    _, blocks = sides.divide(320, 1)
    values: dict[str, list[tuple[float, float]]] = {"mean": [], "variance": [], "log": []}
    for _ in range(300):
        draws = torch.randn(320 // lag, generator=stream, dtype=torch.float64).repeat_interleave(lag)
        each = torch.stack([draws, (draws - draws.mean()).square(), draws.exp()], 1)
        found = sides.Averages(torch.stack([each[blocks == k].mean(0) for k in range(10)]), torch.full((10,), 32.0))
        logs = sides.Averages(found.means.log(), found.sizes)
        statistics = {
            "mean": lambda i, _, own=found: float(own.mean(i)[0]),
            "variance": lambda i, _, own=found: float(own.mean(i)[1] - (own.mean(i)[0] - own.mean()[0]) ** 2),
            "log": lambda i, _, own=logs: float(own.log_mean_exp(i)[2]),
        }
        for name, statistic in statistics.items():
            values[name].append(sides.jackknife(statistic, 10, 1))
    for name, pairs in values.items():
        found_, errors = torch.tensor(pairs).T
        ratio = float(found_.std() / errors.square().mean().sqrt())
        assert 0.85 < ratio < 1.15, name  # three deviations of each are 12 % and 4 %
        assert bool((found_ - found_.mean()).abs().max() < 8 * errors.mean())


# Classes


def classifier(seed: int, count: int = 40, shift: float = 0.0, likelihood: Any = None) -> DrawsPosterior:
    """Draws of a linear classifier of two inputs, their logits shifted together."""
    binary = isinstance(likelihood, pl.likelihoods.Bernoulli)
    x, net = torch.zeros(4, 2), nn.Linear(2, 1 if binary else 3)
    y = torch.tensor([[True], [False]] * 2) if binary else torch.tensor([0, 1, 2, 1])
    model = pl.fit(net, (x, y), pl.MAP(epochs=1), likelihood=likelihood, compile=False, progress=False).model
    stream = random.generator(seed, 306)
    weights = {n: 0.7 * torch.randn(count, *w.shape, generator=stream) for n, w in model.initial.items()}
    weights["bias"] = weights["bias"] + shift * torch.randn(count, 1, generator=stream)
    return DrawsPosterior(pl.MAP(), model, {}, MemoryDraws(weights))


def test_classes_agree_with_the_metrics() -> None:
    one, two = classifier(0), classifier(1)
    x = torch.randn(30, 2, generator=random.generator(0, 307))
    found = pl.fidelity(one, two, x, torch.zeros(30, dtype=torch.int64))
    p, q = one.predict(x), two.predict(x)
    assert found.agreement.value == metrics.agreement(p, q)
    assert found.total_variation.value == pytest.approx(metrics.total_variation(p, q), abs=1e-6)
    gap = (p.log_prob(torch.zeros(30, dtype=torch.int64)) - q.log_prob(torch.zeros(30, dtype=torch.int64))).mean()
    assert found.log_likelihood.value == pytest.approx(float(gap), abs=1e-5)
    assert found.total_variation.error > 0
    ratio = pl.fidelity(one, two, x, regions={"all": x}).epistemic["all"].ratio.value
    assert ratio == pytest.approx(float(p.epistemic.sum(-1).mean() / q.epistemic.sum(-1).mean()), rel=1e-4)


def test_what_all_logits_share_does_not_count() -> None:
    x = torch.randn(10, 2, generator=random.generator(0, 308))
    one, moved, two = classifier(0), classifier(0, shift=5.0), classifier(1)
    plain, shifted = pl.fidelity(one, two, x).wasserstein, pl.fidelity(moved, two, x).wasserstein
    assert shifted.value == pytest.approx(plain.value, rel=1e-4)


def test_yes_no_targets() -> None:
    likelihood = pl.likelihoods.Bernoulli()
    one, two = (classifier(seed, likelihood=likelihood) for seed in (0, 1))
    x = torch.randn(30, 2, generator=random.generator(0, 309))
    found = pl.fidelity(one, two, x)
    p, q = one.predict(x).probs, two.predict(x).probs
    assert found.total_variation.value == pytest.approx(float((p - q).abs().mean()), rel=1e-4)
    assert found.agreement.value == pytest.approx(float(((p > 0.5) == (q > 0.5)).double().mean()))


def test_counts_and_several_outputs() -> None:
    """Rates 2 and 3 at every input, in two outputs: ½ Σ_k |p_k − q_k|."""
    x, net = torch.zeros(4, 1), nn.Linear(1, 2)
    settings: Any = {"likelihood": pl.likelihoods.Poisson(), "compile": False, "progress": False}
    model = pl.fit(net, (x, torch.ones(4, 2)), pl.MAP(epochs=1), **settings).model
    one, two = (
        DrawsPosterior(
            pl.MAP(), model, {}, MemoryDraws({"weight": torch.zeros(1, 2, 1), "bias": torch.full((1, 2), math.log(rate))})
        )
        for rate in (2.0, 3.0)
    )
    k = torch.arange(40.0, dtype=torch.float64)
    p, q = (torch.distributions.Poisson(torch.tensor(rate)).log_prob(k).exp() for rate in (2.0, 3.0))
    found = pl.fidelity(one, two, x).total_variation
    assert found.value == pytest.approx(float(0.5 * (p - q).abs().sum()), abs=1e-5)


# Regions


def test_regions_of_one_input_lie_in_the_gap_and_beyond_the_range() -> None:
    x = torch.cat([torch.linspace(-3, -1, 30), torch.linspace(1, 3, 30)])[:, None]
    found = regions.find(x)
    assert set(found) == {"inside", "between", "outside"}
    assert found["between"].min() > -1
    assert found["between"].max() < 1
    assert found["outside"].abs().min() > 3
    assert (found["outside"] > 0).any()
    assert (found["outside"] < 0).any()
    assert set(found["inside"].flatten().tolist()) <= set(x.flatten().tolist())
    assert set(regions.find(torch.linspace(0, 1, 40)[:, None])) == {"inside", "outside"}


def test_regions_of_several_inputs_lie_between_clusters() -> None:
    stream = random.generator(0, 310)
    x = torch.cat([centre + 0.2 * torch.randn(50, 2, generator=stream) for centre in (-2.0, 2.0)])
    x = torch.cat([x, torch.ones(100, 1)], 1)  # a column that does not vary
    found = regions.find(x)
    assert found["between"][:, :2].mean(1).abs().max() < 1
    assert torch.cdist(found["outside"], x).amin(1).min() > 0.5
    assert bool((found["outside"][:, 2] == 1).all())
    assert set(regions.find(torch.ones(5, 2))) == {"inside"}


# What is shown, and what is refused


def test_results_are_plain_data_and_come_back(full: Posterior) -> None:
    found = pl.fidelity(exact(full.model, 40, 0), exact(full.model, 40, 1, chains=2), inputs(), data=data())
    again = Fidelity.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.to_dict() == found.to_dict()
    assert str(again) == str(found)
    for word in ("Wasserstein-2", "noise floor", "needs y", "no most probable class", "40 draws"):
        assert word in str(found)
    assert len(replace(found, draws=1).as_table()) == len(found.measures)


def test_it_is_a_function_of_the_package() -> None:
    import inspect

    assert list(inspect.signature(pl.fidelity).parameters)[:4] == ["posterior", "reference", "x", "y"]


class Functions(DrawsPosterior):
    """One that has functions and no weights."""

    def weights(self, draws: int | None = None, seed: int = 0) -> Any:
        raise TypeError("a Gaussian process has no weights")


def test_what_cannot_be_measured_is_said(full: Posterior) -> None:
    reference = exact(full.model, 40, 0)
    plain = pl.fidelity(reference, reference, inputs())
    assert math.isnan(plain.stein.value)
    assert "needs data" in plain.stein.note
    assert plain.epistemic == {}
    own = Functions(pl.MAP(), full.model, {}, reference.store)
    assert "a Gaussian process has no weights" in pl.fidelity(own, reference, inputs(), data=data()).stein.note
    point = drawn(full.model, torch.zeros(1, 3))
    found = pl.fidelity(reference, point, inputs(), data=data())
    assert "no spread" in found.wasserstein.note
    assert "no epistemic variance" in found.epistemic["inside"].ratio.note


def refused(**arguments: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as error:
        pl.fidelity(**arguments)
    return str(error.value)


def test_bad_input_is_refused(full: Posterior) -> None:
    own, x = exact(full.model, 10, 0), inputs()
    assert "posterior must be a posterior" in refused(posterior=1, reference=own, x=x)
    assert "reference has" not in refused(posterior=own, reference=None, x=x)
    assert "x is missing" in refused(posterior=own, reference=own)
    assert "y was given without x" in refused(posterior=own, reference=own, y=x)
    text = refused(posterior=classifier(0), reference=own, x=x)
    assert "outputs of shape (3,)" in text
    assert "reference (1,)" in text
    binary = classifier(0, likelihood=pl.likelihoods.Bernoulli())
    assert "same likelihood" in refused(posterior=binary, reference=own, x=x)
    assert "posterior cannot be evaluated at x" in refused(posterior=own, reference=own, x=torch.zeros(4, 2))
    assert "regions must be a dictionary" in refused(posterior=own, reference=own, x=x, regions=[x])
    assert "regions is empty" in refused(posterior=own, reference=own, x=x, regions={})
    assert "draws must be" in refused(posterior=own, reference=own, x=x, draws=0)
    other = nn.Linear(5, 1, bias=False)
    wide = pl.fit(other, (torch.zeros(4, 5), torch.zeros(4, 1)), pl.MAP(epochs=1), compile=False, progress=False)
    assert "posterior cannot be evaluated at x" in refused(posterior=wide, reference=own, x=x)


def test_blocks_are_stretches_of_chains() -> None:
    chain, blocks = sides.divide(40, 4)
    assert chain.tolist()[:5] == [0, 1, 2, 3, 0]
    for block in range(int(blocks.max()) + 1):
        members: Sequence[int] = (blocks == block).nonzero().flatten().tolist()
        assert len({row % 4 for row in members}) == 1
        assert members == list(range(members[0], members[-1] + 1, 4))
    assert sides.divide(1, 1)[1].tolist() == [0]


# The command


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_the_command_compares_saved_runs(tmp_path: Path) -> None:
    stream = random.generator(0, 312)
    rows = [f"{a:.4f},{b:.4f},{a - b:.4f}" for a, b in torch.randn(40, 2, generator=stream).tolist()]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,y", *rows]) + "\n")
    common = ("--target", "y", "--hidden", "none", "--epochs", "30", "--quiet", "--compile", "no")
    for name, method, seed in (("one", "ensemble", "0"), ("two", "mean-field", "0"), ("other", "map", "1")):
        out = ("--out", str(tmp_path / name), "--method", method, "--seed", seed)
        code, text = command("fit", str(table), *common, *out)
        assert code == 0, text
    runs = str(tmp_path / "one"), str(tmp_path / "two")
    code, text = command("fidelity", *runs, "--training", str(table), "--json", "--draws", "50")
    assert code == 0, text
    found = Fidelity.from_dict(json.loads(text))
    assert (found.inputs, found.reference_draws) == (4, 50)  # the rows that were held out
    assert not math.isnan(found.log_likelihood.value)
    assert not math.isnan(found.stein.value)
    code, text = command("fidelity", *runs, "--data", str(table))
    assert code == 0, text
    assert "Wasserstein-2" in text
    assert "needs data" in text
    inputs_alone = tmp_path / "inputs.csv"
    inputs_alone.write_text("a,b\n0.1,0.2\n0.3,-0.5\n")
    code, text = command("fidelity", *runs, "--data", str(inputs_alone))
    assert code == 0, text
    assert "needs y" in text
    for words, message in {
        runs: "give --data",
        (runs[0], str(tmp_path / "other"), "--training", str(table)): "fit both to the same table",
        (*runs, "--training", str(inputs_alone)): "has no column 'y'",
    }.items():
        code, text = command("fidelity", *words)
        assert code == 1
        assert message in " ".join(text.split())


def test_a_reference_that_has_not_converged_is_named(caplog: pytest.LogCaptureFixture) -> None:
    net, x = torch.nn.Linear(1, 1), torch.linspace(-1, 1, 12)[:, None]
    stuck = pl.HMC(draws=8, chains=3, warmup=0, leapfrogs=1, step_size=1e-6, adapt=False, init="prior")
    reference = pl.fit(net, (x, x), stuck, progress=False, compile=False)
    with caplog.at_level("WARNING", logger="plausible"):
        pl.fidelity(reference, reference, x)
    assert "do not agree on f(x)" in caplog.text
