"""Reports on chains say what is so, in numbers that can be checked, and verdicts follow from the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import plausible as pl
from plausible.posteriors import diagnostics
from plausible.posteriors.diagnostics import SummaryTable, function_chains, weight_chains
from plausible.posteriors.verdicts import judged
from tests.helpers.by_hand import CHAINS, DRAWS, draws_of_weights, generator, network, posterior_of

X = torch.linspace(-1, 1, 7)[:, None]


def test_permuted_hidden_units_matter_to_weights_alone() -> None:
    posterior = posterior_of(network(), draws_of_weights(permuted=True))
    functions, weights = posterior.diagnostics(X), posterior.diagnostics()
    assert functions["rhat"] < 1.02
    assert weights["rhat"] > 1.5
    told = posterior.verdict(X)
    assert "agree on functions" in told
    assert "permuted" in told
    assert f"R̂ {weights['rhat']:.2f}" in told
    assert "Weights do not agree between chains" in posterior.verdict()
    same = posterior_of(network(), draws_of_weights())
    assert same.diagnostics()["rhat"] < 1.02
    assert "permuted" not in same.verdict(X)
    assert "The chains agree" in same.verdict(X)
    assert "weights of 4 chains agree" in same.verdict()


def test_chains_that_differ_in_functions_are_told() -> None:
    weights = draws_of_weights()
    weights["2.bias"][0] += 5
    told = posterior_of(network(), weights).verdict(X)
    assert told.startswith("The chains disagree: the worst R̂ is")
    assert "Warm up longer" in told


def test_report_has_the_numbers_of_the_transitions() -> None:
    divergent = torch.zeros(CHAINS, DRAWS)
    divergent[1, :5] = 1
    noise = torch.randn(CHAINS, DRAWS, generator=generator(3), dtype=torch.float64)
    slow = noise.cumsum(1) + 75  # a walk: changes are far narrower than the energies
    acceptance = torch.tensor([0.9, 0.9, 0.9, 0.5])[:, None].expand(CHAINS, DRAWS)
    depth = (torch.arange(DRAWS) % 10 == 0).double() * 10
    posterior = posterior_of(
        network(), draws_of_weights(), divergent=divergent, energy=slow, acceptance=acceptance, depth=depth.expand(CHAINS, -1)
    )
    found = posterior.diagnostics(X)
    assert (found["draws"], found["chains"], found["divergences"]) == (CHAINS * DRAWS, CHAINS, 5)
    assert found["ebfmi"] == pytest.approx(float(diagnostics.ebfmi(slow).min()))
    assert found["acceptance"] == pytest.approx(0.8)
    assert found["acceptance_least"] == pytest.approx(0.5)
    assert (found["step_size"], found["leapfrogs"]) == (pytest.approx(0.1), 7)
    assert found["saturated"] == pytest.approx(0.1)
    assert found["seconds"] == 4
    assert found["ess_per_second"] == pytest.approx(found["ess_bulk"] / 4)
    values = function_chains(posterior, X).flatten(2)
    expected = diagnostics.summary(values)
    assert found["rhat"] == pytest.approx(float(expected["rhat"].max()))
    assert found["ess_tail"] == pytest.approx(float(expected["ess_tail"].min()))
    assert found["mcse"] == pytest.approx(float((expected["mcse"] / expected["sd"]).max()))
    told = posterior.verdict(X)
    assert "5 transitions of 1,200 (0.4\u00a0%) diverged" in told
    assert "target_acceptance (0.8 now, 0.95 say)" in told
    assert "E-BFMI is" in told
    assert "10\u00a0% of the trajectories were cut at max_depth 10 (1,023 leapfrogs)" in told


def test_energies_without_momenta_have_no_ebfmi() -> None:
    noise = torch.randn(CHAINS, DRAWS, generator=generator(3), dtype=torch.float64)
    walk = posterior_of(network(), draws_of_weights(), energy=25 + 3 * noise)  # −log joint alone, of the state before
    assert "ebfmi" not in walk.diagnostics()
    errors = posterior_of(network(), draws_of_weights(), energy=0.01 * noise, log_prior=60.0)
    assert "ebfmi" not in errors.diagnostics()
    assert "ebfmi" not in posterior_of(network(), draws_of_weights(), acceptance=1.0).diagnostics()
    assert "ebfmi" in posterior_of(network(), draws_of_weights()).diagnostics()


def heads(**found: Any) -> str:
    base = {"rhat": 1.001, "ess_bulk": 900.0, "ess_tail": 800.0, "draws": 1000, "chains": 4, "acceptance": 0.8}
    return " ".join(" ".join(verdict) for verdict in judged(base | found))


def test_limits() -> None:
    assert "800 effective draws at least of 1,000" in heads()
    assert "diverged" not in heads(divergences=0)
    assert "E-BFMI" in heads(ebfmi=0.29)
    assert "E-BFMI" not in heads(ebfmi=0.31)
    assert "cut at max_depth" not in heads(saturated=0.005, max_depth=10)
    assert "Only 40" in heads(acceptance=0.4, target_acceptance=0.8)
    assert "shorter than they need be" in heads(acceptance=0.97, target_acceptance=0.8)
    assert "aimed at" not in heads(acceptance=0.9, target_acceptance=0.8)
    assert "One chain hardly moves: it accepts 1.0\u00a0%" in heads(acceptance_least=0.01)
    assert "few independent draws: 100" in heads(ess_bulk=100.0)
    # 100 effective of 1,000 draws, 400 wanted: 3,000 more in all, 750 of each chain
    assert "posterior.extend(draws=800) or a fit with draws=1050" in heads(ess_bulk=100.0)
    assert "moves slowly" in heads(ess_bulk=5.0)
    tones = {share: judged({"divergences": share, "draws": 1000, "acceptance": 0.8})[0].tone for share in (5, 50)}
    assert tones == {5: "unclear", 50: "bad"}


def test_particles_and_replicas_have_words_of_their_own() -> None:
    particles = {"draws": 500, "chains": 1, "log_evidence": -34.25, "effective": 400.0, "acceptance": [0.8, 0.7]}
    good, bad = (judged(particles | {"log_evidence_error": error})[0] for error in (0.05, 3.0))
    assert (good.tone, bad.tone) == ("good", "bad")
    assert "500 particles are worth 400 independent ones at least; the log evidence is −34.25 ± 0.050" in good.headline
    few = judged(particles | {"log_evidence_error": 0.5, "effective": 4.0})[0]
    assert few.headline.startswith("Only 500 particles are worth 4 independent")
    assert "Replicas travel: 7 round trips" in heads(swap_rates=[0.5, 0.3], round_trips=[3, 4])
    assert "Replicas hardly travel: 0 round trips" in heads(swap_rates=[0.5, 0.3], round_trips=[0, 0])
    assert "neighbours exchange 2\u00a0%" in heads(swap_rates=[0.5, 0.02], round_trips=[3, 4])


def test_verdicts_need_draws() -> None:
    x = torch.randn(20, 1, generator=generator())
    members = pl.fit(torch.nn.Linear(1, 1), (x, x.clone()), pl.Ensemble(pl.MAP(epochs=1), members=3), progress=False)
    assert "Nothing can be said about convergence: 3 chains with 1 draw each" in members.verdict()
    fresh = pl.fit(torch.nn.Linear(1, 1), (x, x.clone()), pl.MeanField(epochs=1), progress=False)
    for call in (diagnostics.summary_table, lambda own: own.verdict(), lambda own: own.to_arviz()):
        with pytest.raises(TypeError, match="a LawPosterior has no chains"):
            call(fresh)


def test_stochastic_gradient_chains_are_judged_too() -> None:
    x = torch.randn(40, 1, generator=generator())
    method = pl.Ensemble(pl.SGLD(epochs=40, lr=1e-3), members=2)
    posterior = pl.fit(torch.nn.Linear(1, 1), (x, x.clone()), method, progress=False)
    told = posterior.verdict(x[:5])
    assert f"{posterior.diagnostics(x[:5])['rhat']:.2f}"[:3] in told
    assert "extend" not in told  # which only chains over all data have


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_table_names_every_quantity() -> None:
    weights = draws_of_weights()
    posterior = posterior_of(network(), weights)
    table = diagnostics.summary_table(posterior)
    assert len(table) == 10
    row = table.row("2.weight[0,1]")
    own = weights["2.weight"][:, :, 0, 1].double()
    assert row["mean"] == pytest.approx(float(own.mean()))
    assert row["sd"] == pytest.approx(float(own.flatten().std()))
    assert row["rhat"] == pytest.approx(float(diagnostics.rhat(own[..., None])[0]))
    last = (*(f"2.weight[0,{k}]" for k in range(3)), "2.bias[0]")
    assert diagnostics.summary_table(posterior, names="2.*").names == last
    functions = diagnostics.summary_table(posterior, X)
    assert functions.names == tuple(f"f(x{i})" for i in range(len(X)))
    torch.testing.assert_close(functions["mean"], posterior.functions(X).double().mean(0)[:, 0], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="no random weight matches '7"):
        diagnostics.summary_table(posterior, names="7.*")
    with pytest.raises(ValueError, match="and not both"):
        diagnostics.summary_table(posterior, X, names="0.*")
    with pytest.raises(KeyError, match="is not in the table"):
        table.row("nothing")


def test_table_in_every_form() -> None:
    weights = draws_of_weights()
    weights["0.bias"][0, :, 2] += 3
    weights["2.bias"][:] = 1.5
    table = diagnostics.summary_table(posterior_of(network(), weights))
    assert isinstance(table, SummaryTable)
    worst = table.worst(2)
    assert len(worst) == 2
    assert worst.names[0] == "0.bias[2]"
    assert math.isnan(table.row("2.bias[0]")["rhat"])
    assert table.worst(10).names[-1] == "2.bias[0]"
    lines = str(table).splitlines()
    assert lines[0] == "4 chains of 300 draws"
    assert len(lines) == 12
    assert lines[-1].endswith("–")
    assert table.to_markdown().count("\n") == 11
    frame = table.to_pandas()
    assert frame.loc["0.bias[2]", "rhat"] == table.row("0.bias[2]")["rhat"]


def test_a_limit_keeps_evenly_spaced_weights() -> None:
    weights = draws_of_weights()
    posterior = posterior_of(network(), weights)
    everything, names = weight_chains(posterior)
    assert everything.shape == (CHAINS, DRAWS, 10)
    some, few = weight_chains(posterior, limit=4)
    places = [0, 3, 6, 9]
    assert few == [names[i] for i in places]
    torch.testing.assert_close(some, everything[..., places])
    torch.testing.assert_close(everything[..., names.index("0.bias[1]")], weights["0.bias"][:, :, 1])
