"""Draws that arviz gets are ours, chain by chain, and its diagnostics of them are ours too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import plausible as pl
from plausible.posteriors import diagnostics
from tests.helpers.by_hand import CHAINS, DRAWS, draws_of_weights, network, posterior_of

arviz = pytest.importorskip("arviz")
X = torch.linspace(-1, 1, 5)[:, None]


def test_weights_and_functions_by_chain() -> None:
    weights = draws_of_weights(permuted=True)
    posterior = posterior_of(network(), weights)
    found = posterior.to_arviz(X)
    for name, value in weights.items():
        np.testing.assert_array_equal(found.posterior[name].to_numpy(), value.numpy())
    assert found.posterior["f"].dims == ("chain", "draw", "input", "output_0")
    expected = posterior.functions(X).reshape(DRAWS, CHAINS, 5, 1).transpose(0, 1)
    np.testing.assert_array_equal(found.posterior["f"].to_numpy(), expected.numpy())
    assert found.posterior.attrs["inference_library"] == "plausible"
    assert found.posterior.attrs["sampling_time"] == 4.0


def test_arviz_gives_the_numbers_of_our_table() -> None:
    posterior = posterior_of(network(), draws_of_weights())
    theirs = arviz.summary(posterior.to_arviz(X), var_names=["f"], round_to="none")
    ours = diagnostics.summary_table(posterior, X)
    for column, name in (
        ("mean", "mean"),
        ("sd", "sd"),
        ("mcse_mean", "mcse"),
        ("ess_bulk", "ess_bulk"),
        ("ess_tail", "ess_tail"),
        ("r_hat", "rhat"),
    ):
        # arviz folds in float32, where some draws tie
        np.testing.assert_allclose(theirs[column].to_numpy(dtype=float), ours[name].numpy(), rtol=1e-4)


def test_statistics_have_the_names_of_arviz(tmp_path: Path) -> None:
    divergent = torch.zeros(CHAINS, DRAWS)
    divergent[2, 7] = 1
    posterior = posterior_of(network(), draws_of_weights(), divergent=divergent, **{"precision.0.weight": 2.0, "swap": 0.5})
    found = posterior.to_arviz()
    stats, known = found.sample_stats, posterior.statistics
    assert "f" not in found.posterior
    assert stats["diverging"].dtype == bool
    assert np.argwhere(stats["diverging"].to_numpy()).tolist() == [[2, 7]]
    assert int(stats["n_steps"][0, 0]) == 7
    assert int(stats["tree_depth"][0, 0]) == 3
    np.testing.assert_array_equal(stats["lp"].to_numpy(), (known["log_likelihood"] + known["log_prior"]).numpy())
    np.testing.assert_allclose(arviz.bfmi(found), diagnostics.ebfmi(known["energy"]).numpy(), rtol=1e-9)
    assert {"acceptance_rate", "step_size", "energy", "swap"} <= set(stats)
    assert "precision.0.weight" not in stats
    assert float(found.posterior["precision.0.weight"].mean()) == 2.0
    found.to_netcdf(str(tmp_path / "run.nc"))
    back = arviz.from_netcdf(str(tmp_path / "run.nc"))
    np.testing.assert_array_equal(back.posterior["0.bias"].to_numpy(), found.posterior["0.bias"].to_numpy())


def test_any_stored_draws_can_go() -> None:
    x = torch.randn(30, 1, generator=torch.Generator().manual_seed(0))
    posterior = pl.fit(
        torch.nn.Linear(1, 1), (x, x.clone()), pl.Ensemble(pl.SGLD(epochs=20, lr=1e-3), members=2), progress=False
    )
    found = posterior.to_arviz(x[:3])
    assert dict(found.posterior.sizes)["chain"] == 2
    stored = posterior.weights()["weight"]
    np.testing.assert_array_equal(found.posterior["weight"].to_numpy()[1], stored[1::2].numpy())
    assert "sample_stats" not in found.groups()


def test_training_data_go_along_while_they_are_there() -> None:
    x = torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    method = pl.HMC(draws=8, chains=2, warmup=4, leapfrogs=2)
    found = pl.fit(torch.nn.Linear(1, 1), (x, 2 * x), method, progress=False, compile=False).to_arviz()
    np.testing.assert_array_equal(found.observed_data["y"].to_numpy(), 2 * x.numpy())
    np.testing.assert_array_equal(found.constant_data["x"].to_numpy(), x.numpy())
    assert dict(found.posterior.sizes)["draw"] == 8


def test_arviz_is_only_imported_when_asked_for() -> None:
    code = (
        "import sys, plausible, plausible.posteriors.diagnostics, plausible.posteriors.verdicts, plausible.posteriors.draws\n"
        "assert not {'arviz', 'xarray', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_arviz_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = posterior_of(network(), draws_of_weights(draws=4))
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install 'plausible\[mcmc\]'"):
        posterior.to_arviz()
