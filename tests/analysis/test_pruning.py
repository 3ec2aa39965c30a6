"""Pruning: zeros in every draw, the right weights by brute force, composition, saving, sizes, figures, the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import plausible as pl
from plausible import priors, pruning
from plausible.apps.cli import app
from plausible.core import storage
from plausible.core.storage import DiskDraws, DrawWriter, MemoryDraws
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior
from plausible.posteriors.mixture import MixturePosterior

QUIET: dict[str, Any] = {"progress": False, "compile": False}
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :1] - X[:, 1:2] ** 2


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 1))


def _model(prior: priors.Prior | None = None) -> pl.Model:
    method, data = pl.MAP(epochs=1), (X, Y)
    return pl.fit(_net(), data, method, prior=prior, likelihood=pl.likelihoods.Gaussian(), **QUIET).model


def _gaussian(seed: int = 0, prior: priors.Prior | None = None) -> LawPosterior:
    """Means and scales of random sizes, so that no two criteria agree."""
    model, stream = _model(prior), torch.Generator().manual_seed(seed)
    like = {name: model.initial[name] for name in model.random}
    means = {n: torch.randn(w.shape, generator=stream) for n, w in like.items()}
    scales = {n: torch.rand(w.shape, generator=stream) + 0.05 for n, w in like.items()}
    return LawPosterior(pl.MeanField(), model, {}, DiagonalGaussian(means, scales), {})


def _draws(chains: int = 1, count: int = 8, seed: int = 0) -> DrawsPosterior:
    model, stream = _model(), torch.Generator().manual_seed(seed)
    everything = {**model.initial, **model.buffers}
    stacked = {n: torch.randn((count, *w.shape), generator=stream) for n, w in everything.items()}
    return DrawsPosterior(pl.SGLD(), model, {}, MemoryDraws(stacked), chains)


def _mixture() -> MixturePosterior:
    parts = [_gaussian(k) for k in range(3)]
    return MixturePosterior(pl.Ensemble(pl.MeanField(), members=3), parts[0].model, {}, parts)


KINDS = {"gaussian": _gaussian, "mixture": _mixture, "chain": _draws, "chains": lambda: _draws(chains=2, count=9)}


def _pruned_places(posterior: Any, name: str, draws: int) -> Tensor:
    """Where weights must be 0, for each of all draws: [draws, *shape]."""
    mask = posterior.masks[name]
    if isinstance(posterior, MixturePosterior):
        return ~mask.repeat_interleave(draws // len(posterior.parts), 0)
    if isinstance(posterior, DrawsPosterior) and posterior.chains > 1:
        return ~mask[torch.arange(draws) % posterior.chains]
    return ~mask.expand(draws, *mask.shape)


def _brute_force(mean: Tensor, scale: Tensor, by: str) -> Tensor:
    mean, scale = mean.double(), scale.double()
    return {"snr": mean.abs() / scale, "magnitude": mean.abs(), "log_alpha": mean.square().log() - scale.square().log()}[by]


# ---------------------------------------------------------------------------------------------------------------------
# Which weights


@pytest.mark.parametrize("by", pruning.CRITERIA)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 1 / 3, 0.5, 0.95, 1.0])
def test_the_smallest_go_and_the_number_is_exact(by: Any, fraction: float) -> None:
    posterior = _gaussian()
    pruned = posterior.prune(fraction, by=by)
    assert set(pruned.masks) == {"0.weight", "3.weight"}  # no biases, no norms, no noise
    flat = torch.cat([_brute_force(posterior.means[n], posterior.scales[n], by).flatten() for n in pruned.masks])
    kept = torch.cat([mask.flatten() for mask in pruned.masks.values()])
    assert int((~kept).sum()) == round(fraction * len(flat))
    if 0 < fraction < 1:
        assert flat[~kept].max() < flat[kept].min()


def test_log_alpha_and_snr_are_one_order_and_magnitude_another() -> None:
    posterior = _gaussian()
    masks = {by: posterior.prune(0.5, by=by).masks for by in pruning.CRITERIA}
    assert all(torch.equal(masks["snr"][n], masks["log_alpha"][n]) for n in masks["snr"])
    assert not all(torch.equal(masks["snr"][n], masks["magnitude"][n]) for n in masks["snr"])


@pytest.mark.parametrize(("by", "threshold"), [("snr", 1.3), ("magnitude", 0.4), ("log_alpha", -0.7)])
def test_thresholds_cut_where_they_say(by: Any, threshold: float) -> None:
    posterior = _gaussian()
    for name, mask in posterior.prune(threshold=threshold, by=by).masks.items():
        value = _brute_force(posterior.means[name], posterior.scales[name], by)
        torch.testing.assert_close(mask, -value <= threshold if by == "log_alpha" else value >= threshold)
        assert bool(mask.any())
        assert not bool(mask.all())
    twin = posterior.prune(threshold=math.exp(-3 / 2)).masks
    assert all(torch.equal(m, twin[n]) for n, m in posterior.prune(threshold=3.0, by="log_alpha").masks.items())


def test_where_and_layers() -> None:
    posterior = _gaussian()
    assert set(posterior.prune(0.5, where="all").masks) == {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
    assert set(posterior.prune(0.5, where=["0.*", "3.bias"]).masks) == {"0.weight", "0.bias", "3.bias"}
    assert set(posterior.prune(0.5, where=lambda name: name.startswith("3")).masks) == {"3.weight", "3.bias"}
    each = posterior.prune(0.5, per_layer=True).masks
    assert [int((~mask).sum()) for mask in each.values()] == [12, 3]


def test_ties_and_weights_without_signal() -> None:
    posterior = _gaussian()
    ones = {n: torch.ones_like(m) for n, m in posterior.means.items()}
    posterior.law = DiagonalGaussian(ones, {n: torch.ones_like(m) for n, m in posterior.scales.items()})
    mask = posterior.prune(0.5).masks["0.weight"].flatten()
    assert int((~mask).sum()) == 15
    assert not bool(mask[:15].any())
    posterior.means["0.weight"][0], posterior.scales["0.weight"][0] = 0.0, 0.0
    posterior.scales["0.weight"][1] = 0.0  # certain
    assert not bool(posterior.prune(4 / 30).masks["0.weight"][0].any())
    assert bool(posterior.prune(0.8).masks["0.weight"][1].all())
    assert bool((pruning.scores(posterior, "log_alpha")["0.weight"][0] == math.inf).all())
    last = posterior.prune(1.0, where="3.weight")  # 6 of 30: what is pruned already comes before what merely is 0
    assert bool(last.prune(6 / 30).masks["0.weight"].all())


def test_moments_of_chains_are_those_of_their_draws() -> None:
    posterior = _draws(chains=2, count=9)
    drawn = posterior.weights()["0.weight"].double()
    for chain, (mean, scale) in enumerate(posterior.networks()):
        torch.testing.assert_close(mean["0.weight"], drawn[chain::2].mean(0))
        assert scale is not None
        torch.testing.assert_close(scale["0.weight"], drawn[chain::2].std(0))


# ---------------------------------------------------------------------------------------------------------------------
# What a pruned posterior is


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_weights_are_exactly_zero_everywhere(kind: str, tmp_path: Path) -> None:
    posterior = KINDS[kind]()
    before = posterior.functions(X, seed=3)
    pruned = posterior.prune(0.6)
    assert type(pruned) is type(posterior)
    assert pruned.log_evidence is None
    again = pl.load(pruned.save(tmp_path / "p"), _net())
    few = None if isinstance(posterior, DrawsPosterior) else 6  # all stored ones, so that row r is of chain r mod 2
    whole = posterior.weights(few)
    for found in (pruned, again, pruned.to("cpu"), again.to("cpu")):
        drawn = found.weights(few)
        count = len(drawn["0.weight"])
        for name in ("0.weight", "3.weight"):
            places = _pruned_places(found, name, count)
            assert bool((drawn[name][places] == 0).all())
            assert not bool((drawn[name][~places] == 0).any())
            torch.testing.assert_close(drawn[name][~places], whole[name][~places], rtol=0, atol=0)
        torch.testing.assert_close(drawn["0.bias"], whole["0.bias"], rtol=0, atol=0)
        masks = torch.cat([m.flatten() for m in found.masks.values()])
        assert float((~masks).float().mean()) == pytest.approx(0.6)
        by_hand = torch.stack(
            [
                torch.func.functional_call(_net(), {n: w[s] for n, w in drawn.items() if not n.startswith("like")}, X)
                for s in range(count)
            ]
        )
        torch.testing.assert_close(found.functions(X, few), by_hand)
        torch.testing.assert_close(found.predict(X, few).mean, by_hand.mean(0))
        assert "60.0 % of" in str(found.summary()).splitlines()[0]
        assert "pruned" in str(found.summary()).splitlines()[2]
    torch.testing.assert_close(posterior.functions(X, seed=3), before, rtol=0, atol=0)  # left as it was
    assert posterior.masks == {}
    assert "pruned" not in str(posterior.summary())


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_composes(kind: str) -> None:
    posterior = KINDS[kind]()
    half = posterior.prune(0.5)
    once, twice = posterior.prune(0.8), half.prune(0.8)
    assert all(torch.equal(mask, twice.masks[name]) for name, mask in once.masks.items())
    torch.testing.assert_close(once.functions(X, seed=2), twice.functions(X, seed=2), rtol=0, atol=0)
    assert all(torch.equal(mask, half.prune(0.2).masks[name]) for name, mask in half.masks.items())
    both = half.prune(0.5, where="0.bias", by="magnitude").masks
    assert set(both) == {"0.weight", "0.bias", "3.weight"}
    assert torch.equal(both["0.weight"], half.masks["0.weight"])


def test_draws_on_disk_stay_there(tmp_path: Path) -> None:
    writer = DrawWriter(tmp_path, shard_bytes=560)
    memory = _draws(chains=2, count=9)
    for row in range(9):
        writer.add({name: value[row] for name, value in memory.store.get(range(9), "cpu").items()})
    store = writer.store()
    assert isinstance(store, DiskDraws)
    assert len(store.files) > 2
    disk = DrawsPosterior(memory.method, memory.model, {}, store, 2)
    for way in ({"fraction": 0.7}, {"threshold": 0.3}):
        left, right = memory.prune(**way), disk.prune(0.3).prune(**way)
        expected = memory.prune(0.3).prune(**way)
        assert isinstance(left.store, MemoryDraws)
        assert isinstance(right.store, storage.PrunedDraws)
        assert isinstance(right.store.store, DiskDraws)
        torch.testing.assert_close(right.weights(4, 1), expected.weights(4, 1), rtol=0, atol=0)
        torch.testing.assert_close(storage.gather(right.store), storage.gather(expected.store), rtol=0, atol=0)


@pytest.mark.parametrize(
    "prior",
    [
        priors.Gaussian(0.7),
        priors.Laplace(0.4),
        priors.FanIn(priors.Gaussian(1.5)),
        priors.ScaleMixture(0.5, 1.0, 0.1),
        priors.LogUniform(),
        priors.Flat(),
    ],
    ids=str,
)
def test_kl_is_that_of_the_weights_left(prior: priors.Prior) -> None:
    """KL of independent weights is a sum: that of all, less that of those which were pruned, alone in a posterior."""
    posterior = _gaussian(prior=prior)
    assert posterior.prune(0.0).kl(samples=200) == pytest.approx(posterior.kl(samples=200), rel=1e-9)
    pruned = posterior.prune(0.5)
    stream, expected, spread = torch.Generator().manual_seed(0), 0.0, 0.0
    for name, mean in posterior.means.items():
        mean, scale = mean.double(), posterior.scales[name].double()
        mask = pruned.masks.get(name, torch.ones_like(mean, dtype=torch.bool))
        drawn = mean + scale * torch.randn(1000, *mean.shape, generator=stream, dtype=torch.float64)
        logs = torch.func.vmap(lambda w, name=name: prior.elementwise(name, w))(drawn)[:, mask].sum(1)
        entropy = (scale[mask].log() + 0.5 * math.log(2 * math.pi * math.e)).sum()
        expected += float(-entropy - logs.mean())
        spread += float(logs.var() / len(logs) + logs.var() / 200)
    assert pruned.kl(samples=200) == pytest.approx(expected, abs=5 * math.sqrt(spread) + 1e-9)
    assert pruned.kl(samples=200) != pytest.approx(posterior.kl(samples=200), rel=1e-3)


def test_ratios_and_diagnostics_of_what_is_left() -> None:
    posterior = _gaussian()
    pruned = posterior.prune(0.5)
    mask = pruned.masks["0.weight"]
    assert bool((pruned.snr()["0.weight"][~mask] == 0).all())
    assert bool((pruned.snr(decibels=True)["0.weight"][~mask] == -math.inf).all())
    torch.testing.assert_close(pruned.snr()["0.weight"][mask], posterior.snr()["0.weight"][mask])
    assert pruned.diagnostics()["snr_quartiles"][0] > posterior.diagnostics()["snr_quartiles"][0]
    nothing = posterior.prune(1.0, where="all")  # but the noise of the likelihood
    assert nothing.kl() > 0
    assert math.isfinite(nothing.diagnostics()["snr_quartiles"][0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_pruning_on_another_device_is_the_same(kind: str) -> None:
    there, here = KINDS[kind]().to("cuda").prune(0.5), KINDS[kind]().prune(0.5)
    assert all(torch.equal(mask.cpu(), here.masks[name]) and mask.is_cuda for name, mask in there.masks.items())
    torch.testing.assert_close(there.prune(0.7).functions(X).cpu(), here.to("cuda").prune(0.7).functions(X).cpu())


def test_fits_of_every_kind_can_be_pruned() -> None:
    for method in (
        pl.MAP(epochs=2),
        pl.Ensemble(pl.MAP(epochs=2), members=2),
        pl.SGLD(epochs=12),
        pl.Ensemble(pl.MeanField(epochs=2), members=2),
    ):
        posterior = pl.fit(_net(), (X, Y), method, **QUIET)
        pruned = posterior.prune(0.5, by="magnitude")
        assert int((~pruned.masks["0.weight"]).sum()) > 0
        assert bool(torch.isfinite(pruned.predict(X).mean).all())
        assert pruned.diagnostics()["divergences"] == 0
        if isinstance(method, pl.Ensemble):
            assert pruned.masks["0.weight"].shape == (2, 6, 4)


def test_tied_weights_are_zero_in_both_places() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))[:, :1]

    posterior = pl.fit(Tied(), (X, Y), pl.MeanField(epochs=3), **QUIET).prune(1.0)
    assert set(posterior.masks) == {"one.weight"}
    outputs = posterior.functions(X, 3)
    torch.testing.assert_close(outputs, outputs[:, :1].expand_as(outputs))  # biases alone


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_the_table_counts_and_measures() -> None:
    posterior = _gaussian()
    found = pruning.table(posterior, (0, 0.5, 1), x=X, y=Y, by=("snr", "magnitude"), draws=20)
    rows = {(row.by, row.fraction): row for row in found.rows}
    assert [rows["snr", share].kept for share in (0, 0.5, 1)] == [30, 15, 0]
    for (by, share), row in rows.items():
        pruned = posterior.prune(share, by=by)  # type: ignore[arg-type]
        predictive = pruned.predict(X, 20)
        assert row.rmse == pytest.approx(pl.metrics.rmse(predictive, Y))
        assert row.nll == pytest.approx(-pl.metrics.log_likelihood(predictive, Y))
        assert row.error is None
        assert row.weights == 30
    parameters = sum(p.numel() for p in _net().parameters())
    masks = posterior.prune(0.5).masks
    left = [int(masks["0.weight"].sum()), int(masks["3.weight"].sum())]
    index = min(3, 4 * left[0]) + min(1, 4 * left[1])  # bits: 24/8 and ⌈6/8⌉ bytes
    assert rows["snr", 0.5].dense_bytes == rows["snr", 0].sparse_bytes == 4 * parameters
    assert rows["snr", 0.5].sparse_bytes == 4 * (parameters - 30 + sum(left)) + index
    assert rows["snr", 1].sparse_bytes == 4 * (parameters - 30)
    text = str(found)
    assert "RMSE by snr" in text
    assert "NLL (nats) by magnitude" in text
    assert "50 %" in text
    assert len(json.loads(json.dumps(found.to_dict()))["rows"]) == 6
    assert "pruned by magnitude" in str(pruning.table(posterior, by="magnitude"))


def test_the_table_of_classes_and_of_a_mixture() -> None:
    labels = (Y[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    posterior = pl.fit(net, (X, labels), pl.Ensemble(pl.MeanField(epochs=3), members=2), **QUIET)
    row = pruning.table(posterior, (0.5,), x=X, y=labels, draws=10).rows[0]
    assert row.error == pytest.approx(1 - pl.metrics.accuracy(posterior.prune(0.5).predict(X, 10), labels))
    assert (row.weights, row.kept, row.dense_bytes) == (30, 15, 4 * 37)  # of one network


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either fraction or threshold, got neither"),
        ({"fraction": 0.5, "threshold": 1.0}, "got both"),
        ({"fraction": 75}, "fraction must be a number from 0 .*got 75; 75 % is 0.75"),
        ({"fraction": -0.1}, "fraction must be"),
        ({"fraction": math.nan}, "fraction must be"),
        ({"fraction": True}, "fraction must be"),
        ({"fraction": "0.5"}, "fraction must be"),
        ({"threshold": math.inf}, "threshold must be a finite number"),
        ({"threshold": -13.0}, "must not be negative.*decibels are the ratio"),
        ({"threshold": 1.0, "per_layer": True}, "per_layer goes with fraction"),
        ({"fraction": 0.5, "by": "size"}, "by must be one of 'snr', 'magnitude', 'log_alpha', got 'size'"),
        ({"fraction": 0.5, "where": "5.*"}, r"where='5\.\*' matches no weight"),
        ({"fraction": 0.5, "where": lambda _: False}, "selects no weight to prune"),
        ({"fraction": 0.5, "where": "likelihood.*"}, "matches no weight"),
        ({"fraction": 0.5, "where": "last"}, "where='last' is for fit"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _gaussian().prune(**arguments)


def test_what_cannot_be_ranked_is_refused() -> None:
    point = _draws(count=1)
    with pytest.raises(ValueError, match="one draw of each weight and no spread: use by='magnitude'"):
        point.prune(0.5)
    assert point.prune(0.5, by="magnitude").masks
    with pytest.raises(ValueError, match="by='log_alpha' compares"):
        _draws(chains=3, count=3).prune(0.5, by="log_alpha")
    posterior = _gaussian()
    posterior.means["0.weight"][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"mean of weight '0\.weight' contains NaN"):
        posterior.prune(0.5)
    posterior = _gaussian()
    posterior.scales["3.weight"][0, 0] = -1.0
    with pytest.raises(ValueError, match=r"scale of weight '3\.weight' contains NaN, infinity or negative"):
        posterior.prune(0.5)
    assert posterior.prune(0.5, by="magnitude").masks
    with pytest.raises(ValueError, match="no random weight has two axes"):
        pl.fit(_net(), (X, Y), pl.MeanField(epochs=1), where="*.bias", **QUIET).prune(0.5)
    with pytest.raises(ValueError, match="give x and y together: y is missing"):
        pruning.table(posterior, x=X)
    with pytest.raises(ValueError, match="at least one fraction"):
        pruning.table(posterior, ())


def test_a_posterior_without_weights_refuses() -> None:
    class Functions(DrawsPosterior):
        networks = pl.Posterior.networks

    posterior = _draws()
    with pytest.raises(TypeError, match="Functions has no means and scales of weights"):
        Functions(posterior.method, posterior.model, {}, posterior.store).prune(0.5)


def test_a_damaged_mask_is_refused(tmp_path: Path) -> None:
    folder = _gaussian().prune(0.5).save(tmp_path / "p")
    (folder / "masks.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"masks\.safetensors is damaged"):
        pl.load(folder, _net())
    _rewrite(folder, {"0.weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"mask of '0\.weight' does not fit"):
        pl.load(folder, _net())


def _rewrite(folder: Path, masks: dict[str, Tensor]) -> None:
    content = storage.read_json(folder / "posterior.json")
    content["masks_sha256"] = storage.write_tensors(folder / "masks.safetensors", masks)
    storage.write_json(folder / "posterior.json", content)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_figures_show_the_ratios_and_the_weights() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    from plausible import plots

    posterior = _gaussian()
    values = np.sort(torch.cat([s.flatten() for s in pruning.scores(posterior).values()]).numpy())
    decibels = 20 * np.log10(values)
    ax = plots.snr_cdf(posterior, (0.5,))
    level, share = ax.lines[0].get_data()
    np.testing.assert_allclose(share, [(decibels <= at).mean() for at in level])
    assert ax.lines[1].get_xdata()[0] == pytest.approx(decibels[14])  # 15 of 30 lie at or below it
    ax = plots.snr(posterior, (0.5, 0.9), bins=7)
    heights, edges, _ = ax.patches[0].get_data()
    assert float((heights * np.diff(edges)).sum()) == pytest.approx((decibels >= edges[0]).mean())
    assert [text.get_text() for text in ax.texts] == ["50 %", "90 %"]
    assert [line.get_xdata()[0] for line in ax.lines] == pytest.approx([decibels[14], decibels[26]])
    pruned = posterior.prune(0.5)
    ax = plots.snr(pruned)
    assert "50.0 % lie further left" in ax.get_xlabel()
    ax = plots.pruned_weights(posterior, pruned, bins=5)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["all 30 weights", "15 left"]
    assert plots.pruned_weights(_mixture(), _mixture().prune(0.2)).get_legend().get_texts()[1].get_text() == "72 left"
    ax = plots.weight_histogram({"a": posterior, "b": _draws()}, draws=2)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    for call, message in (
        (lambda: plots.pruned_weights(posterior, posterior), "must be before.prune"),
        (lambda: plots.snr(posterior.prune(1.0)), "no weight with a finite"),
        (lambda: plots.snr(posterior, (75,)), "cuts must be a number from 0"),
        (lambda: plots.weight_histogram({}), "posteriors is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    pyplot.close("all")


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def _command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prune")
    stream = torch.Generator().manual_seed(0)
    lines = ["a,b,kind,price"]
    for a, b, noise in torch.randn(60, 3, generator=stream).tolist():
        lines.append(f"{a:.3f},{b:.3f},{'x' if noise > 0 else 'y'},{100 + 10 * a + noise:.2f}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    common = ("--epochs", 3, "--hidden", 5, "--quiet")
    for method, target in (("mean-field", "price"), ("map", "kind")):
        made = _command("fit", folder / "table.csv", "-t", target, "-m", method, "-o", folder / method, *common)
        assert made.exit_code == 0, made.output
    return folder


def test_prune_writes_a_run_that_predicts(run: Path) -> None:
    out = run / "small"
    result = _command("prune", run / "mean-field", "--fraction", 0.6, "--data", run / "table.csv", "--out", out)
    assert result.exit_code == 0, result.output
    assert "its 6 held-out rows are measured" in result.stderr
    assert "10 of 25 weights are left" in result.stderr
    assert "RMSE" in result.stdout
    assert "60 %" in result.stdout
    from plausible.apps.cli.runs import load, read_record

    _, posterior = load(out)
    assert int(sum(mask.sum() for mask in posterior.masks.values())) == 10
    assert read_record(out).settings["pruned"]["fraction"] == 0.6
    predicted = _command("predict", out, run / "table.csv", "--out", "-")
    assert predicted.exit_code == 0
    assert len(predicted.stdout.splitlines()) == 61
    for command in ("info", "report"):
        assert _command(command, out).exit_code == 0
    again = _command("prune", out, "--fraction", 0.8, "--data", run / "table.csv", "--by", "log-alpha", "--biases")
    assert again.exit_code == 0, again.output
    assert (run / "small-pruned" / "run.json").is_file()


def test_prune_without_a_share_writes_nothing(run: Path) -> None:
    before = sorted(run.iterdir())
    result = _command("prune", run / "map", "--by", "magnitude", "--fractions", "0,0.5")
    assert result.exit_code == 0
    assert "nothing was written" in result.stderr
    assert "sizes only" in result.stderr
    assert "error" not in result.stdout
    assert sorted(run.iterdir()) == before
    result = _command("prune", run / "map", "--by", "magnitude", "--data", run / "table.csv")
    assert "error" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("map", "--fraction", 0.5), "--by snr compares each weight with its spread.*use --by magnitude"),
        (("mean-field", "--fraction", 50), "--fraction must be .*50 % is 0.5"),
        (("mean-field", "--fraction", 0.5, "--threshold", 1), "either --fraction or --threshold"),
        (("mean-field", "--fractions", "0,half"), "--fractions takes shares"),
        (("mean-field", "--fraction", 0.5, "--out", "mean-field"), "is the run itself"),
        (("mean-field", "--fraction", 0.5, "--out", "map"), "exists and is not empty"),
        (("mean-field", "--fraction", 0.5, "--data", "other.csv"), "no column 'price'"),
        (("mean-field", "--draws", 0), "--draws must be at least 1"),
        (("nowhere", "--fraction", 0.5), "is not a folder"),
        (("map", "--by", "magnitude", "--data", "strange.csv"), "a class that the run does not know, 'z' in row 2"),
        (("mean-field", "--data", "empty.csv"), "no row with a target and all inputs"),
    ],
)
def test_prune_refuses_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], message: str
) -> None:
    monkeypatch.chdir(run)
    (run / "other.csv").write_text("a,b\n1,2\n")
    (run / "strange.csv").write_text("a,b,kind,price\n1,2,x,3\n1,2,z,3\n")
    (run / "empty.csv").write_text("a,b,kind,price\n1,2,x,\n")
    before = sorted(run.iterdir())
    result = _command("prune", *arguments)
    assert result.exit_code == 1, result.output
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert sorted(run.iterdir()) == before
