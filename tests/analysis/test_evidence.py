"""Evidence against exact answers, Bayes factors that are known, and what `compare` refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import plausible as pl
from plausible import evidence
from plausible.apps.cli import app

QUIET: dict[str, Any] = {"progress": False, "compile": False}
NOISE = 0.3
N = 30


def _data(inputs: int = 4) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(N, inputs, generator=stream, dtype=torch.float64)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.2 + NOISE * torch.randn(N, 1, generator=stream, dtype=torch.float64)
    return x, y


X, Y = _data()
MODE = pl.MAP(epochs=50, batch_size=None, lr=0.05)


def _linear(inputs: int, scale: float = 1.0, method: Any = None, noise: Any = NOISE, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(inputs, 1).double()
    method = method or pl.Laplace(structure="full", mode=MODE)
    prior = pl.priors.Gaussian(scale)
    likelihood = pl.likelihoods.Gaussian(noise)
    return pl.fit(net, (X[:, :inputs], Y), method, prior=prior, likelihood=likelihood, **QUIET, **options)


def _exact(inputs: int, precision: float | Tensor = 1.0, noise: float = NOISE) -> float:
    """Log N(y; 0, σ²I + Φ diag(1/τ) Φᵀ), Φ = [x, 1]."""
    features = torch.cat([X[:, :inputs], torch.ones(N, 1, dtype=torch.float64)], 1)
    tau = torch.as_tensor(precision, dtype=torch.float64).expand(inputs + 1)
    covariance = noise**2 * torch.eye(N, dtype=torch.float64) + features @ torch.diag(1 / tau) @ features.T
    return float(torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(Y[:, 0]))


def _tanh(width: int, method: Any, seed: int = 0, noise: Any = "learned") -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    stream = torch.Generator().manual_seed(1)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1, generator=stream, dtype=torch.float64)
    return pl.fit(net, (x, y), method, prior=pl.priors.Gaussian(1.0), likelihood=pl.likelihoods.Gaussian(noise), **QUIET)


# ---------------------------------------------------------------------------------------------------------------------
# Exact answers


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_evidence_of_a_linear_model_is_exact(scale: float) -> None:
    posterior = _linear(4, scale)
    assert posterior.log_evidence == pytest.approx(_exact(4, scale**-2), abs=1e-6)
    parts = posterior.evidence
    assert float(parts.log_likelihood + parts.log_occam) == pytest.approx(posterior.log_evidence, abs=1e-9)


def test_bayes_factors_and_probabilities_are_those_of_the_exact_evidence() -> None:
    found = evidence.compare({"two": _linear(2), "four": _linear(4), "narrow": _linear(2, 0.1)})
    exact = {"two": _exact(2), "four": _exact(4), "narrow": _exact(2, 100.0)}
    assert found.best == "two"
    for first in exact:
        assert found[first].log_evidence == pytest.approx(exact[first], abs=1e-6)
        assert found[first].log_bayes_factor == pytest.approx(exact[first] - exact["two"], abs=1e-6)
        for second in exact:
            assert found.log_bayes_factor(first, second) == pytest.approx(exact[first] - exact[second], abs=1e-6)
    total = torch.tensor(list(exact.values())).logsumexp(0)
    for name, value in exact.items():
        assert found.probabilities[name] == pytest.approx(math.exp(value - total), rel=1e-5)
    assert [row.name for row in found.rows] == sorted(exact, key=lambda name: -exact[name])


def test_prior_probabilities_multiply_the_evidence() -> None:
    posteriors = {"two": _linear(2), "four": _linear(4)}
    ratio = math.exp(_exact(2) - _exact(4))
    found = evidence.compare(posteriors, {"two": 0.2, "four": 0.8})
    assert found.probabilities["two"] == pytest.approx(0.2 * ratio / (0.2 * ratio + 0.8), rel=1e-5)
    assert evidence.compare(posteriors, [0.0, 1.0]).probabilities == {"two": 0.0, "four": 1.0}
    assert evidence.compare(posteriors, [0.0, 1.0]).best == "four"
    assert evidence.compare(posteriors, [0.0, 1.0])["two"].log_bayes_factor == 0.0  # the data still speak for it


@pytest.mark.parametrize("how", ["global", "weight"])
def test_tuned_precisions_are_where_the_evidence_is_flat(how: Any) -> None:
    posterior = _linear(4, method=pl.Laplace(structure="full", tune=how, rounds=30, mode=MODE))
    log_tau = {name: value.log().requires_grad_() for name, value in posterior.precision.items()}
    value = posterior.log_marginal({name: each.exp() for name, each in log_tau.items()})
    slopes = torch.autograd.grad(value, list(log_tau.values()))
    if how == "weight":  # weights that the data do not ask for have precisions without end
        kept = torch.cat([(t.exp() < 1e6).reshape(-1) for t in log_tau.values()])
        assert bool(kept.any())
        assert float(torch.cat([s.reshape(-1) for s in slopes])[kept].abs().max()) < 1e-3
    else:
        assert abs(float(sum(s.sum() for s in slopes))) < 1e-3
    assert posterior.log_evidence > _linear(4).log_evidence
    if how == "global":
        tau = float(posterior.precision["weight"])
        best = max(_exact(4, tau * factor) for factor in np.exp(np.linspace(-1, 1, 201)))
        assert posterior.log_evidence == pytest.approx(best, abs=1e-4)


@pytest.mark.slow
def test_each_layer_of_a_network_has_the_precision_where_the_evidence_is_flat() -> None:
    method = pl.Laplace(structure="full", tune="layer", rounds=25, polish=100, mode=MODE)
    posterior = _tanh(4, method)
    log_tau = {name: value.log().requires_grad_() for name, value in posterior.precision.items()}
    value = posterior.log_marginal({name: each.exp() for name, each in log_tau.items()})
    slopes = dict(zip(log_tau, torch.autograd.grad(value, list(log_tau.values()))))
    for layer in ("0", "2"):
        assert abs(float(slopes[f"{layer}.weight"] + slopes[f"{layer}.bias"])) < 0.02
        assert float(slopes[f"{layer}.weight"].abs()) > 0.1  # by itself it would be another
    assert float(posterior.precision["0.weight"]) != float(posterior.precision["2.weight"])


def test_a_tuned_noise_counts_the_weights_that_the_data_determine() -> None:
    posterior = _linear(4, noise="learned", method=pl.Laplace(structure="full", tune="global", rounds=30, mode=MODE))
    residuals = Y - torch.nn.functional.linear(X, posterior.means["weight"], posterior.means["bias"])
    variance = float(posterior.points["likelihood.log_scale"].exp().square().mean())
    free = N - posterior.effective
    assert variance == pytest.approx(float(residuals.square().sum()) / free, rel=1e-3)
    tau, noise = float(posterior.precision["weight"]), math.sqrt(variance)
    top = posterior.log_evidence
    assert top == pytest.approx(_exact(4, tau, noise), abs=1e-5)
    assert all(_exact(4, tau, noise * factor) < top for factor in (0.95, 1.05))


def test_the_evidence_of_a_network_is_that_of_a_mode() -> None:
    """Gauss-Newton steps arrive where as many steps of L-BFGS do not."""
    posterior = _tanh(6, pl.Laplace(structure="full", polish=150, mode=pl.MAP(epochs=30, batch_size=None, lr=0.02)), noise=0.1)
    assert posterior.report["distance"] < 0.01


def test_weights_and_a_learned_noise_arrive_at_one_mode() -> None:
    from plausible.blocks.curvature.products import log_joint_gradient
    from plausible.core.data import as_data

    posterior = _linear(4, noise="learned", method=pl.Laplace(structure="full", mode=MODE, tune=None))
    data = as_data((X, Y), dtype=torch.float64, device=torch.device("cpu"))
    _, slope = log_joint_gradient(posterior.model, {**posterior.means, **posterior.points}, data)
    assert max(float(value.abs().max()) for value in slope.values()) < 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# Bounds, symmetries, averages


def test_a_variational_bound_is_below_the_evidence_and_said_to_be_one() -> None:
    bound = _linear(2, method=pl.MeanField(epochs=400, batch_size=None, lr=0.02, samples=8))
    found = evidence.compare({"bound": bound, "laplace": _linear(4)})
    assert found["bound"].log_evidence < _exact(2) + 0.3  # the last epoch's bound is an average over few draws
    assert found["bound"].bound
    assert found["bound"].note == "lower bound"
    assert found["bound"].log_occam is None
    assert not found["laplace"].bound
    assert "lower bound" in str(found)
    assert "lower bound" in found.to_markdown()


def test_two_methods_on_one_model_have_no_bayes_factor() -> None:
    laplace, bound = _linear(2), _linear(2, method=pl.MeanField(epochs=5, batch_size=None))
    message = r"b are the same model, fitted by Laplace and MeanField.*an estimate.*a lower bound.*no Bayes factor"
    with pytest.raises(ValueError, match=message):
        evidence.compare({"a": laplace, "b": bound})
    tuned = _linear(2, method=pl.Laplace(structure="full", mode=MODE, tune="layer"))
    with pytest.raises(ValueError, match="no Bayes factor"):  # its prior is its own, as the method chose it
        evidence.compare({"tuned": tuned, "bound": bound})
    evidence.compare({"one start": laplace, "another": _linear(2)})  # by one method
    evidence.compare({"wide prior": laplace, "narrow prior": _linear(2, 0.1, method=pl.MeanField(epochs=5, batch_size=None))})


def test_symmetries_are_counted() -> None:
    tanh = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert evidence.log_symmetries(tanh) == pytest.approx(math.log(6 * 8 * 24 * 16))
    assert evidence.log_symmetries(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))) == pytest.approx(math.log(6))
    assert evidence.log_symmetries(nn.Linear(2, 1)) == 0.0
    with pytest.raises(ValueError, match="symmetries of a TransformerEncoderLayer are not known"):
        evidence.log_symmetries(nn.TransformerEncoderLayer(4, 2))
    one = _tanh(2, pl.Laplace(structure="full", polish=50, mode=MODE))
    two = _tanh(3, pl.Laplace(structure="full", polish=50, mode=MODE))
    plain = evidence.compare({"a": one, "b": two})
    counted = evidence.compare({"a": one, "b": two}, symmetries=True)
    assert counted["a"].log_evidence - plain["a"].log_evidence == pytest.approx(math.log(8))
    assert counted["b"].log_evidence - plain["b"].log_evidence == pytest.approx(math.log(48))


def test_the_average_over_models_is_weighted_by_their_probabilities() -> None:
    posteriors = {
        "two": _tanh(2, pl.Laplace(structure="full", mode=MODE)),
        "six": _tanh(6, pl.Laplace(structure="full", mode=MODE)),
    }
    gap = posteriors["two"].log_evidence - posteriors["six"].log_evidence
    odds = math.exp(-gap)  # prior odds that make both about equally probable
    found = evidence.compare(posteriors, {"two": 0.7 * odds / (0.7 * odds + 0.3), "six": 0.3 / (0.7 * odds + 0.3)})
    assert found.probabilities["two"] == pytest.approx(0.7, abs=1e-6)
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None]
    draws = 2000
    averaged = found.predict(x, draws=draws)
    parts = {name: own.predict(x) for name, own in posteriors.items()}
    expected = sum(found.probabilities[name] * part.mean for name, part in parts.items())
    error = sum(found.probabilities[name] * part.epistemic for name, part in parts.items()).sqrt() / math.sqrt(draws)  # type: ignore[union-attr]
    assert float(((averaged.mean - expected).abs() / error).max()) < 5
    spread = sum(p * (parts[n].epistemic + (parts[n].mean - expected) ** 2) for n, p in found.probabilities.items())
    assert bool(torch.isclose(averaged.epistemic, spread, rtol=0.25).all())


def test_models_with_other_likelihoods_are_compared_and_not_averaged() -> None:
    one, two = _linear(2), _linear(2, noise=0.5)
    evidence.compare({"a": one, "b": two}, [0.0, 1.0]).predict(X[:, :2], draws=3)  # a has no share
    two.log_evidence = one.log_evidence
    with pytest.raises(ValueError, match=r"cannot be averaged: a has Gaussian\(scale=0.3.*b Gaussian\(scale=0.5"):
        evidence.compare({"a": one, "b": two}).predict(X[:, :2])


def test_shares_of_draws_have_the_right_sum() -> None:
    assert evidence._shares([0.7, 0.3], 10) == [7, 3]
    assert evidence._shares([1 / 3] * 3, 10) == [4, 3, 3]
    assert evidence._shares([0.999, 0.001], 10) == [10, 0]


def test_verdicts_are_those_of_kass_and_raftery() -> None:
    words = [evidence.verdict(value) for value in (0.0, -0.9, 2.0, -4.0, 5.1, -100.0)]
    assert words == ["hardly worth a mention"] * 2 + ["positive", "strong", "very strong", "very strong"]


def test_the_table_says_what_the_records_say() -> None:
    found = evidence.compare([_linear(2), _linear(4)])
    assert [record["name"] for record in found.to_records()] == [row.name for row in found.rows]
    assert set(found.probabilities) == {"Laplace 1", "Laplace 2"}
    for text in (str(found), found.to_markdown()):
        assert all(word in text for word in ("Laplace 1", "log Occam factor", f"{found.rows[0].probability:.3f}"))
    assert found.to_markdown().splitlines()[1].count("---") == found.to_markdown().splitlines()[0].count("|") - 1
    assert "2 models" in repr(found)
    with pytest.raises(KeyError, match="'x' was not compared; there are: Laplace"):
        found["x"]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def test_what_cannot_be_compared_is_refused() -> None:
    one, two = _linear(2), _linear(4)
    with pytest.raises(ValueError, match="at least two posteriors, got 1"):
        evidence.compare({"one": one})
    with pytest.raises(TypeError, match=r"posteriors must be a mapping .* got LaplacePosterior"):
        evidence.compare(one)
    with pytest.raises(TypeError, match=r"posteriors\['b'\] must be a posterior, .* got float"):
        evidence.compare({"a": one, "b": 3.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="same as text"):
        evidence.compare({1: one, "1": two})  # type: ignore[dict-item]
    point = _linear(2, method=MODE)
    with pytest.raises(ValueError, match="point has no log_evidence: MAP estimates none"):
        evidence.compare({"one": one, "point": point})
    fewer = pl.fit(
        nn.Linear(2, 1).double(),
        (X[:20, :2], Y[:20]),
        pl.Laplace(structure="full", mode=MODE),
        likelihood=pl.likelihoods.Gaussian(NOISE),
        **QUIET,
    )
    with pytest.raises(ValueError, match="one was fitted on 30 examples, fewer on 20"):
        evidence.compare({"one": one, "fewer": fewer})
    classes = pl.fit(
        nn.Linear(2, 2).double(), (X[:, :2], (Y[:, 0] > 0).long()), pl.Laplace(structure="full", mode=MODE), **QUIET
    )
    with pytest.raises(ValueError, match="same targets: one has a likelihood of continuous targets, classes of classes"):
        evidence.compare({"one": one, "classes": classes})
    for priors, message in (
        ([0.5], "one number for each of 2 models, got 1"),
        ([0.5, 0.6], "sum to 1"),
        ([1.5, -0.5], "0 or more"),
        ({"a": 1.0}, "must name the models one, two"),
    ):
        with pytest.raises(ValueError, match=message):
            evidence.compare({"one": one, "two": two}, priors)  # type: ignore[arg-type]
    found = evidence.compare({"one": one, "two": two})
    with pytest.raises(ValueError, match="draws must be a whole number"):
        found.predict(X, draws=0)
    one.log_evidence = math.nan
    with pytest.raises(ValueError, match="the log evidence of one is nan"):
        evidence.compare({"one": one, "two": two})


# ---------------------------------------------------------------------------------------------------------------------
# The figure and the command


def test_the_figure_has_a_point_for_each_model() -> None:
    pytest.importorskip("matplotlib")
    from plausible.apps.plots.comparing import rank_correlation

    first = {"4×1": [1.0, 2.0], "8×1": [5.0, 6.0], "4×2": [3.0, 3.5]}
    second = {"4×1": [0.1, 0.2], "8×1": [0.9, 0.8], "4×2": [0.3, 0.5]}
    ax = pl.plots.evidence(first, second, groups={"4×1": "one layer", "8×1": "one layer", "4×2": "two layers"})
    assert {text.get_text() for text in ax.texts} == set(first)
    assert "rank correlation 1.00" in ax.get_title()
    words = {text.get_text() for text in ax.get_legend().get_texts()}
    assert words == {"one layer", "two layers", "most evidence", "best prediction"}
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    found = evidence.compare({"two": _linear(2), "four": _linear(4)})
    assert "2 models" in pl.plots.evidence(found, {"two": 0.0, "four": 1.0}).get_title()
    many = {str(k): float(k) for k in range(8)} | {"broken": -1000.0}
    far = pl.plots.evidence(many, many)
    assert far.get_xlim()[0] > -10
    assert "far below: broken" in {text.get_text() for text in far.texts}
    with pytest.raises(ValueError, match="must name the same models"):
        pl.plots.evidence(first, {"4×1": 1.0})
    with pytest.raises(ValueError, match="not finite"):
        pl.plots.evidence(first, {**second, "4×2": [math.nan]})


def _call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of one table, one with other training rows, one without evidence."""
    folder = tmp_path_factory.mktemp("runs")
    stream = np.random.default_rng(0)
    rows = [f"{a:.3f},{math.sin(2 * a) + stream.normal(0, 0.1):.3f}" for a in stream.uniform(-2, 2, 60)]
    (folder / "data.csv").write_text("a,b\n" + "\n".join(rows) + "\n")
    settings = {
        "line": ("--method", "laplace", "--hidden", "none"),
        "wide": ("--method", "laplace", "--hidden", "8"),
        "other": ("--method", "laplace", "--hidden", "none", "--seed", "1"),
        "point": ("--method", "map"),
        "bound": ("--method", "mean-field", "--hidden", "none"),
    }
    for name, options in settings.items():
        more = ("--activation", "tanh", "--set", "structure=full", "--set", "polish=100") if "laplace" in options else ()
        common = ("-t", "b", "-o", folder / name, "--quiet", "--epochs", "50", "--compile", "no")
        result = _call("fit", folder / "data.csv", *common, *options, *more)
        assert result.exit_code == 0, result.output
    return {name: folder / name for name in settings}


def test_runs_are_compared_on_the_command_line(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = _call("evidence", runs["line"], runs["wide"], "--markdown", "--plot", tmp_path / "figure.png")
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "figure.png").stat().st_size > 1000
    first = shown.stdout.splitlines()[2]
    assert str(runs["wide"]) in first  # a line does not follow a sine
    assert "very strong" in shown.stdout
    assert "probability" in _call("evidence", runs["line"], runs["wide"], "--prior", "0.9,0.1", "--symmetries").stdout
    for arguments, words in (
        ((runs["line"],), "at least two posteriors"),
        ((runs["line"], runs["line"]), "named twice"),
        ((runs["line"], runs["other"]), "models of the same data"),
        ((runs["line"], runs["point"]), "has no log_evidence"),
        ((runs["line"], runs["wide"], "--prior", "1"), "--prior takes 2 numbers"),
        ((runs["line"], runs["bound"]), "it is no Bayes factor"),
    ):
        failed = _call("evidence", *arguments)
        assert failed.exit_code == 1
        assert words in " ".join(failed.stderr.split())
