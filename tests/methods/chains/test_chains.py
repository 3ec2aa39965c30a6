"""Chains as users meet them: odd networks and data, starting points, streams, interrupted and extended runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible.blocks.kernels import native_source
from plausible.core.storage import DrawWriter

SHORT: dict[str, Any] = {"draws": 6, "warmup": 4, "chains": 2, "leapfrogs": 3}
QUIET: dict[str, Any] = {"progress": False, "compile": False}


def data(outputs: int = 1) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    return torch.randn(20, 2, generator=stream), torch.randn(20, outputs, generator=stream)


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)


def test_a_network_may_have_a_part_named_chain(tmp_path: Path) -> None:
    posterior = pl.fit(Chained(), data(), pl.HMC(**SHORT), **QUIET)
    x, _ = data()
    assert float(posterior.functions(x).std(0).min()) > 0
    assert "chain.0.weight" in posterior.weights()
    assert "acceptance" in posterior.statistics
    posterior.save(tmp_path / "run")
    assert torch.equal(pl.load(tmp_path / "run", Chained()).functions(x), posterior.functions(x))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(nn.functional.dropout(x))


@pytest.mark.parametrize("method", [pl.HMC(**SHORT), pl.SMC(particles=8, pilots=4)])
def test_a_density_that_is_no_function_is_refused(method: pl.Method) -> None:
    with pytest.raises(ValueError, match="differs between two calls"):
        pl.fit(Dropping(), data(), method, **QUIET)


def test_half_precision_is_refused() -> None:
    x, y = data()
    with pytest.raises(ValueError, match="float32 or float64"):
        pl.fit(net().bfloat16(), (x.bfloat16(), y.bfloat16()), pl.HMC(**SHORT), **QUIET)


@pytest.mark.parametrize("as_loader", [True, False])
def test_streams_are_added_up(as_loader: bool) -> None:
    x, y = data()
    rows = TensorDataset(x, y)
    source: Any = DataLoader(rows, batch_size=7) if as_loader else rows
    one, two = (pl.fit(net(), source, pl.HMC(**SHORT), **QUIET), pl.fit(net(), (x, y), pl.HMC(**SHORT), **QUIET))
    torch.testing.assert_close(one.functions(x), two.functions(x), rtol=1e-3, atol=1e-4)


def test_a_loader_that_drops_rows_is_refused() -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=7, shuffle=True, drop_last=True)
    with pytest.raises(ValueError, match=r"drop_last|differs|examples"):
        pl.fit(net(), loader, pl.HMC(**SHORT), **QUIET)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[..., None])[0][:, -1])


def test_a_network_that_cannot_be_stacked_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="plausible"):
        pl.fit(Recurrent(), data(), pl.HMC(**SHORT), prior=pl.priors.Hierarchical(), **QUIET)
    assert sum("one after the other" in record.message for record in caplog.records) == 1


def test_chains_start_at_draws_of_their_own() -> None:
    x, _ = data()
    earlier = pl.fit(net(), data(), pl.MeanField(epochs=5), **QUIET)
    posterior = pl.fit(
        net(), data(), pl.HMC(draws=1, warmup=0, chains=3, leapfrogs=1, step_size=1e-6, adapt=False), init=earlier, **QUIET
    )
    f = posterior.functions(x)
    assert float((f[0] - f[1]).abs().max()) > 1e-3


def test_a_tempered_model_has_no_evidence_by_replicas() -> None:
    model, (x, y) = _model(), data()
    method = pl.ParallelTempering(draws=4, warmup=4, chains=1, temperatures=3, leapfrogs=2)
    assert pl.fit(model.tempered(0.5), (x, y), method, **QUIET).log_evidence is None
    assert pl.fit(model, (x, y), method, **QUIET).log_evidence is not None


def test_masked_data_and_moved_posteriors_go_on(tmp_path: Path) -> None:
    x, y = data(2)
    y[3, 1] = torch.nan
    posterior = pl.fit(net(2), (x, y), pl.HMC(**SHORT), mask="nan", **QUIET)
    longer = posterior.extend(2, progress=False)
    assert torch.equal(posterior.to("cpu").extend(2, progress=False).functions(x), longer.functions(x))
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", net(2)).extend(2, data=(x, y), mask="nan", progress=False)
    assert torch.equal(loaded.functions(x), longer.functions(x))
    with pytest.raises(ValueError, match="draws"):
        posterior.extend(None)  # type: ignore[arg-type]


def test_statistics_of_draws_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrawWriter, "SHARD_BYTES", 500)
    kept = pl.fit(net(), data(), pl.HMC(**SHORT), checkpoint=tmp_path / "run", **QUIET)
    whole = pl.fit(net(), data(), pl.HMC(**SHORT), **QUIET)
    assert len(list((tmp_path / "run" / "draws").iterdir())) > 1
    assert torch.equal(kept.statistics["energy"], whole.statistics["energy"])
    assert kept.statistics["energy"].shape == (2, 6)


class Stopping:
    """Presses Ctrl-C at a step."""

    def __init__(self, at: int):
        self.at = at

    def __call__(self, step: int, _: Any) -> None:
        if step == self.at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


def test_particles_on_their_way_are_no_posterior() -> None:
    method = pl.SMC(particles=16, pilots=8, moves=1, temperatures=6, leapfrogs=2)
    with pytest.raises(KeyboardInterrupt, match="before the posterior was reached"):
        pl.fit(net(), data(), method, callbacks=[Stopping(2)], **QUIET)


def test_chains_that_are_stopped_give_what_there_is() -> None:
    with pytest.warns(UserWarning, match="Ctrl-C"):
        posterior = pl.fit(net(), data(), pl.HMC(**SHORT), callbacks=[Stopping(7)], **QUIET)
    assert 2 <= len(posterior) < 12
    with pytest.raises(KeyboardInterrupt, match="first draw"):
        pl.fit(net(), data(), pl.HMC(**SHORT), callbacks=[Stopping(2)], **QUIET)


@pytest.mark.parametrize("settings", [{"jitter": "a"}, {"target_acceptance": "0.8"}, {"step_size": "x"}])
def test_words_for_numbers_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(settings))):
        pl.HMC(**settings)


@pytest.mark.compile
def test_a_cache_that_cannot_be_written_to(compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(native_source, "cache_folder", lambda: blocked)
    posterior = pl.fit(net(), data(), pl.HMC(**SHORT), progress=False, compile=True)
    assert posterior.run["mode"] == "native"


def test_ranks_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from plausible.engine import ranks, running

    monkeypatch.setattr(ranks.Team, "divides", True, raising=False)
    with pytest.raises(ValueError, match="PLAUSIBLE_RANKS=alone") as refused:
        running.run(pl.HMC(**SHORT), _model(), None, running.Options(team=ranks.Team()))  # type: ignore[arg-type]
    assert "Ensemble" not in str(refused.value)


def _model() -> pl.Model:
    from plausible.core.data import as_data

    x, y = data()
    prepared = as_data((x, y), dtype=x.dtype, device=x.device)
    return pl.Model.build(net(), pl.likelihoods.Gaussian(1.0), pl.priors.Gaussian(), prepared.all(), num_data=20)


TINY: list[Any] = [
    *(pl.HMC(draws=4, warmup=24, chains=2, leapfrogs=2, metric=metric) for metric in ("diag", "dense", "lowrank")),  # type: ignore[arg-type]
    pl.NUTS(draws=2, warmup=24, chains=2, max_depth=2),
    pl.ChEES(draws=2, warmup=24, chains=2, max_leapfrogs=2),
    pl.MCLMC(draws=2, warmup=30, chains=2, thin=2),
    pl.MILE(draws=2, warmup=30, chains=2, thin=2, mode=pl.MAP(epochs=3, patience=2)),
    pl.MALA(draws=4, warmup=24, chains=2),
    pl.Metropolis(draws=4, warmup=24, chains=2, metric="dense"),
    pl.EllipticalSlice(draws=4, warmup=4, chains=2),
    pl.ParallelTempering(draws=4, warmup=24, chains=2, temperatures=3, leapfrogs=2),
    pl.SMC(particles=8, pilots=4, moves=1),
    pl.AnnealedImportance(particles=8, pilots=4, temperatures=4),
]


@pytest.mark.parametrize("prior", [None, pl.priors.Hierarchical(groups="layer")], ids=["gaussian", "hierarchical"])
@pytest.mark.parametrize("method", TINY, ids=lambda m: f"{m.name}-{getattr(m, 'metric', '')}".strip("-"))
def test_float32_networks_do_not_mind_another_default_type(method: Any, prior: Any) -> None:
    """The same bits as without it: nothing is made in the default type."""
    network, (x, y) = net(), data()
    likelihood = pl.likelihoods.Gaussian("learned")
    plain = pl.fit(network, (x, y), method, prior=prior, likelihood=likelihood, **QUIET)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = pl.fit(network, (x, y), method, prior=prior, likelihood=likelihood, **QUIET)
        functions = wide.functions(x)
    finally:
        torch.set_default_dtype(before)
    assert functions.dtype == torch.float32
    assert torch.equal(functions, plain.functions(x))
