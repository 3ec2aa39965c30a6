"""What is measured on MNIST, against brute force; the errors of Singh's code, against closed forms."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import plausible as pl
from experiments import load, mnist
from experiments.frame import Request
from experiments.singh import Backprop, layers
from plausible.blocks.variational import entropy
from plausible.core.data import ArrayData, Batch
from plausible.core.model import Model
from plausible.engine.method import Run
from plausible.posteriors.laws import DiagonalGaussian


@pytest.fixture(scope="module")
def member() -> pl.Posterior:
    torch.manual_seed(0)
    x, y = torch.randn(60, 784), torch.randint(10, (60,))
    settings = mnist.Classifier(pl.MeanField(epochs=2, initial_scale=0.1), units=8)
    return pl.fit(mnist.network(settings), (x, y), settings.method, compile=False, progress=False)


def test_probabilities_are_averaged_over_draws_and_logarithms_with_the_mean(member: pl.Posterior) -> None:
    x = torch.randn(5, 784)
    stream = torch.Generator().manual_seed(3)
    draws = []
    for _ in range(4):
        weights = {n: m + member.scales[n] * torch.randn(m.shape, generator=stream) for n, m in member.means.items()}
        draws.append(member.model.outputs({**weights, **member.points}, x).softmax(-1))
    stacked = torch.stack(draws)
    torch.testing.assert_close(mnist.averaged(member, x, 4, 3), stacked.mean(0), rtol=1e-5, atol=1e-6)
    mean = member.model.outputs({**member.means, **member.points}, x).softmax(-1)
    geometric = torch.cat([stacked, mean[None]]).log().mean(0).exp()
    torch.testing.assert_close(mnist.averaged(member, x, 4, 3, geometric=True), geometric, rtol=1e-5, atol=1e-6)


def test_pruned_weights_are_zero_in_every_draw(member: pl.Posterior) -> None:
    x = torch.randn(5, 784)
    kept = member.prune(0.9, where="*weight")
    bare = {n: torch.where(kept.masks[n], m, 0.0) if n in kept.masks else m for n, m in member.means.items()}
    exact = member.model.outputs({**bare, **member.points}, x).softmax(-1)
    narrow = member.prune(0.9, where="*weight")
    narrow.law = DiagonalGaussian(member.means, {name: 1e-9 * scale for name, scale in member.scales.items()})
    torch.testing.assert_close(mnist.averaged(narrow, x, 3, 0), exact, rtol=1e-4, atol=1e-5)
    assert all("weight" in name for name in kept.masks)


def test_histograms_have_the_shares_and_cuts_of_the_weights(member: pl.Posterior) -> None:
    found = mnist.snr_histogram([member], (0.0, 0.5, 0.95))
    ratios = torch.cat([r.flatten() for n, r in member.snr(decibels=True).items() if n.endswith("weight")])
    assert sum(found["shares"]) == pytest.approx(1.0, abs=1e-6)
    assert found["cuts"]["0.5"] == pytest.approx(float(ratios.median()), abs=0.05)
    assert float((ratios < found["cuts"]["0.95"]).float().mean()) == pytest.approx(0.95, abs=1e-3)
    weights = mnist.weight_histogram([member])
    assert 0.9 < sum(weights["shares"]) <= 1 + 1e-6
    spread = torch.cat([w.flatten() for n, w in member.weights(1).items() if n.endswith("weight")]).std()
    assert weights["std"] == pytest.approx(float(spread), rel=1e-4)
    assert mnist.snr_histogram([object()], ()) is None  # points have no ratio


def test_modes_are_counted() -> None:
    x = torch.linspace(-5, 5, 200)
    one, other = torch.exp(-0.5 * (x + 2) ** 2), torch.exp(-0.5 * (x - 2) ** 2)
    assert mnist.peaks(one.tolist()) == 1
    assert mnist.peaks((one + 0.5 * other).tolist()) == 2
    noisy = one * (1 + 0.05 * torch.randn(200, generator=torch.Generator().manual_seed(0)))
    assert mnist.peaks(noisy.tolist()) == 1


def test_images_are_split_and_normalised_as_published(data_folder: Path) -> None:
    base = mnist.Classifier(pl.MeanField(), units=4)
    parts = mnist.images(base)
    assert {name: len(y) for name, (_, y) in parts.items()} == {"train": 50_000, "validation": 10_000, "test": 10_000}
    raw = pl.datasets.mnist(raw=True)
    torch.testing.assert_close(parts["validation"][0], raw.train[0][50_000:].flatten(1).float() / 126)
    assert float(mnist.images(replace(base, normalisation="unit"))["test"][0].max()) == 1.0
    x = mnist.images(replace(base, normalisation="standard"))["train"][0].double()
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std()) == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="train: got 60000, but only 50,000"):
        mnist.images(replace(base, train=60_000))


def test_errors_of_a_run_are_one_number_a_seed(tiny: Callable[[str], Path]) -> None:
    import json

    result = json.loads((tiny("blundell-2015") / "blundell-2015/tiny/mixture-400.json").read_text())
    assert {len(values) for values in result["errors"].values()} == {2}
    assert result["curve"]["epoch"] == [1, 2]
    assert result["curve"]["test, mean"][-1] == result["errors"]["test, mean"]
    assert result["pruned"]["snr"]["0"] != result["pruned"]["snr"]["0.98"]
    assert result["errors"]["test, mean"][0] != result["errors"]["test, mean"][1]
    best = [min(range(2), key=lambda e, k=k: result["curve"]["validation, 2 draws"][e][k]) for k in range(2)]
    assert result["at_best_validation"] == [result["curve"]["test, 2 draws"][e][k] for k, e in enumerate(best)]


def test_a_run_stopped_by_ctrl_c_goes_on_and_ends_the_same(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load("blundell-2015").cell("gaussian-400").settings["tiny"]
    request = Request(seeds=2, device="cpu", compile=False, progress=False)
    whole = mnist.run(settings, request)
    errors = mnist._errors

    def interrupting(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return errors(*arguments)

    again = replace(request, checkpoint=tmp_path / "checkpoint")
    monkeypatch.setattr(mnist, "_errors", interrupting)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="stopped by Ctrl-C"):
        mnist.run(settings, again)
    monkeypatch.setattr(mnist, "_errors", errors)
    resumed = mnist.run(settings, again)
    for key in ("errors", "curve", "at_best_validation", "weights"):
        assert resumed[key] == whole[key], key


# Singh's code


def stepped(counts: tuple[float, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """The KL that the first step logs, and the scales it saw."""
    torch.manual_seed(0)
    network = mnist.network(mnist.Classifier(pl.MeanField(), units=3))
    batch = Batch(torch.randn(4, 784), torch.randint(10, (4,)))
    model = Model.build(network, pl.likelihoods.Categorical(), pl.priors.Gaussian(1.0), batch, num_data=4)
    method = Backprop(epochs=1, batch_size=4, counts=counts, estimator="weights", lr=0.1)
    run = Run.alone(method, model, ArrayData(batch, 4))
    state = method.start(model, run, torch.tensor([1, 2]))
    scales = {name: F.softplus(rho) for name, rho in state.rhos.items()}
    _, info = method.step(model, run, state, batch)
    return float(info["kl"]), scales


def test_log_q_of_the_original_code_counts_the_second_layer_twice_and_the_third_never() -> None:
    right, scales = stepped((1.0, 1.0, 1.0))
    wrong, _ = stepped((1.0, 2.0, 0.0))
    groups = layers(scales)
    assert [len(names) for names in groups] == [2, 2, 2]
    second, third = (float(entropy({n: scales[n] for n in names})) for names in groups[1:])
    assert wrong - right == pytest.approx(third - second, rel=1e-3)


def test_the_start_is_uniform_as_in_the_original_code() -> None:
    network = mnist.network(mnist.Classifier(pl.MeanField(), units=100))
    batch = Batch(torch.randn(4, 784), torch.randint(10, (4,)))
    model = Model.build(network, pl.likelihoods.Categorical(), pl.priors.Gaussian(1.0), batch, num_data=4)
    run = Run.alone(Backprop(), model, ArrayData(batch, 4))
    states = [Backprop().start(model, run, torch.tensor([1, k])) for k in range(2)]
    mean, rho = states[0].weights["0.weight"], states[0].rhos["0.weight"]
    count = mean.numel()
    assert float(mean.abs().max()) <= 0.2
    assert float(mean.double().var()) == pytest.approx(0.4**2 / 12, rel=6 / math.sqrt(count))
    assert -5 <= float(rho.min()) <= float(rho.max()) <= -4
    assert float(rho.double().mean()) == pytest.approx(-4.5, abs=6 / math.sqrt(12 * count))
    assert not torch.equal(mean, states[1].weights["0.weight"])
    correlation = torch.corrcoef(torch.stack([mean.flatten(), rho.flatten()]))[0, 1]
    assert abs(float(correlation)) < 6 / math.sqrt(count)
