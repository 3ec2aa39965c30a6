"""On an NVIDIA GPU: captured = eager, compiled and captured = eager, resume, mixed precision, moving a posterior."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible import testing
from plausible.core import random, storage
from plausible.core.data import as_data
from plausible.core.schedules import Cosine
from plausible.core.weights import clone, tensors
from plausible.engine.method import Run
from plausible.engine.source import Source
from plausible.engine.stepper import Captured, Eager
from plausible.methods import registry
from plausible.testing import LinearGaussian

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    y = (x[:, :1] * x[:, 1:2]).sin() + 0.1 * torch.randn(300, 1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), x, y


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("members", [None, 3])
@pytest.mark.parametrize("batch_size", [64, None])
def test_captured_steps_equal_eager_steps(compiled: bool, members: int | None, batch_size: Any) -> None:
    net, x, y = problem()
    device = torch.device("cuda")
    data = as_data((x, y), dtype=torch.float32, device=device)
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), data.all(), num_data=300, device=device)
    single = pl.MAP(epochs=50, batch_size=batch_size, lr=pl.schedules.Cosine(1e-2))
    method = single if members is None else pl.Ensemble(single, members=members)
    stage = method.stages()[0]
    run = Run.alone(stage, model, data)
    source = Source(data, stage.plan(300), seed=0, members=members)
    state = stage.start(model, run, random.key(0, device=device))
    eager = Eager(stage.step, model, run, clone(state), source)
    captured = Captured(stage.step, model, run, clone(state), source, compiled=compiled)
    infos = [stepper.advance(0, 12, lambda _: False) for stepper in (eager, captured)]
    for a, b in zip(tensors(eager.state), tensors(captured.state)):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)
    for a, b in zip(*infos):
        torch.testing.assert_close(a["log_joint"].cpu(), b["log_joint"].cpu(), rtol=2e-3, atol=1e-2)


def test_sgld_noise_differs_between_steps_and_members_and_has_the_right_size() -> None:
    net = nn.Linear(50, 1, bias=False)
    x, y = torch.zeros(40, 50), torch.zeros(40, 1)
    method = pl.Ensemble(pl.SGLD(epochs=300, batch_size=None, lr=0.1, burn_in=0.5, thin=1), members=4, init="given")
    settings: dict[str, Any] = {
        "likelihood": pl.likelihoods.Gaussian(1.0),
        "device": "cuda",
        "compile": "auto",
        "progress": False,
    }
    posterior = pl.fit(net, (x, y), method, **settings)
    assert "captured" in posterior.run["mode"]
    draws = posterior.weights()["weight"].squeeze(1)  # the prior: N(0, 1), biased by 1/(1 - ε/4)
    assert len(torch.unique(draws[:, 0])) == len(draws)
    assert abs(float(draws.var()) * (1 - 0.1 / 4) - 1) < 0.1
    again = pl.fit(net, (x, y), method, **settings).weights()["weight"].squeeze(1)
    assert torch.equal(draws, again)
    other = pl.fit(net, (x, y), method, seed=1, **settings).weights()["weight"].squeeze(1)
    assert not torch.equal(draws, other)


@pytest.mark.parametrize("mode", [False, "auto"])
def test_resume_on_a_gpu(tmp_path: Path, mode: Any) -> None:
    net, x, y = problem()
    method = pl.SGLD(epochs=100, batch_size=64, lr=1e-5)

    class Kill(Exception):
        pass

    def kill(step: int, _: Any) -> None:
        if step >= 300:
            raise Kill

    settings: dict[str, Any] = {"device": "cuda", "progress": False, "compile": mode}
    whole = pl.fit(net, (x, y), method, **settings)
    place = pl.Checkpoint(tmp_path / "c", steps=100)
    with pytest.raises(Kill):
        pl.fit(net, (x, y), method, checkpoint=place, callbacks=[kill], **settings)
    resumed = pl.fit(net, (x, y), method, checkpoint=place, **settings)
    torch.testing.assert_close(whole.functions(x), resumed.functions(x), rtol=1e-3, atol=1e-3)


def test_mixed_precision_and_moving() -> None:
    net, x, y = problem()
    posterior = pl.fit(net, (x, y), pl.MAP(epochs=60), device="cuda", precision="bfloat16", progress=False)
    full = pl.fit(net, (x, y), pl.MAP(epochs=60), device="cuda", progress=False)
    assert abs(float(posterior.predict(x).log_prob(y).mean() - full.predict(x).log_prob(y).mean())) < 0.2
    there = full.to("cpu")
    assert there.predict(x).mean.device.type == "cpu"
    torch.testing.assert_close(there.predict(x).mean, full.predict(x).mean.cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
@pytest.mark.parametrize("compiled", ["auto", True], ids=["captured", "compiled"])
def test_mean_field_reaches_its_optimum_on_the_gpu(estimator: str, compiled: Any) -> None:
    problem = LinearGaussian()
    method = pl.MeanField(epochs=800, batch_size=None, lr=Cosine(0.05), samples=4, estimator=estimator, initial_scale=0.1)  # type: ignore[arg-type]
    posterior = problem.fit(method, device="cuda", compile=compiled)
    assert "captured" in posterior.run["mode"]
    mean, covariance = problem.posterior()
    exact = torch.linalg.inv(covariance).diagonal().rsqrt()
    found = posterior.means["weight"].flatten().double().cpu()
    torch.testing.assert_close(found, mean, rtol=0, atol=0.15 * float(exact.max()))
    torch.testing.assert_close(posterior.scales["weight"].flatten().double().cpu(), exact, rtol=0.16, atol=0)


def test_more_draws_begin_with_the_same_ones_on_the_gpu() -> None:
    posterior = LinearGaussian().fit(pl.MeanField(epochs=5), device="cuda")
    x = torch.randn(7, 3)
    many = posterior.functions(x, 37)
    for count in (1, 3, 10, 11, 25):
        torch.testing.assert_close(posterior.functions(x, count), many[:count])
    assert len({float(f.sum()) for f in many}) == 37


def test_a_sweep_runs_as_one_captured_program() -> None:
    x, y, _ = (part.float() for part in LinearGaussian().data())
    found = pl.sweep(
        LinearGaussian().network(),
        (x, y),
        pl.MeanField(epochs=300, batch_size=None),
        {"lr": [0.02, 0.01], "prior.scale": [0.5, 1.5]},
        (x, y),
        likelihood=pl.likelihoods.Gaussian(scale=0.5),
        device="cuda",
        compile=True,
        precision="tf32",
        progress=False,
    )
    assert [group["mode"] for group in found.groups] == ["compiled+captured"]
    assert all(row["scores"]["rmse"] < 0.7 for row in found.rows)


@pytest.mark.parametrize("name", sorted(registry))
def test_every_method_keeps_its_law_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "flow" in name:
        pytest.importorskip("zuko")
    plain = LinearGaussian.fit

    def there(self: LinearGaussian, method: Any, **settings: Any) -> Any:
        return plain(self, method, **{**settings, "device": "cuda", "compile": "auto"}).to("cpu")

    monkeypatch.setattr(LinearGaussian, "fit", there)
    testing.check_exact_posterior(registry[name].conforming())


@pytest.mark.parametrize("structure", ["diag", "block", "kron", "ekfac", "lowrank", "full"])
@pytest.mark.parametrize("network", ["perceptron", "convolutional", "recurrent", "attention"])
def test_curvature_is_the_same_on_the_gpu(structure: Any, network: str) -> None:
    torch.manual_seed(0)
    nets: dict[str, Any] = {
        "perceptron": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
        "convolutional": lambda: nn.Sequential(
            nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3)
        ),
        "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), _Last(nn.LSTM(4, 5, batch_first=True)), nn.Linear(5, 3)),
        "attention": lambda: nn.Sequential(
            nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(12, 3)
        ),
    }
    net, x, y = nets[network](), torch.randn(40, 12), torch.arange(40) % 3
    method = pl.Laplace(mode=None, structure=structure, rank=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network is not at a mode")
        here, there = (pl.fit(net, (x, y), method, device=device, progress=False) for device in ("cpu", "cuda"))
    for a, b in zip(here.moments(x[:5]), there.moments(x[:5])):
        torch.testing.assert_close(a, b.cpu(), rtol=5e-3, atol=2e-3 * float(a.abs().max()))
    assert here.log_evidence == pytest.approx(there.log_evidence, rel=1e-3)
    assert there.predict(x[:5]).probs.device.type == "cuda"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", [pl.MAP(epochs=300), pl.MeanField(epochs=300), pl.HMC(draws=20, warmup=20, chains=2)])
def test_recurrent_nets_have_gradients_on_the_gpu(method: Any, dropout: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(_Last(nn.LSTM(4, 5, num_layers=2, dropout=dropout, batch_first=True)), nn.Linear(5, 1))
    x = torch.randn(60, 3, 4)
    y = x[:, :, 0].sum(1, keepdim=True)
    posterior = pl.fit(net, (x, y), method, device="cuda", progress=False)
    after, before = posterior.predict(x).mean.cpu(), net.eval()(x).detach()
    assert float((after - y).square().mean()) < 0.5 * float((before - y).square().mean())
    torch.testing.assert_close(posterior.functions(x), posterior.functions(x))  # no dropout in predictions


class _Last(nn.Module):
    def __init__(self, body: nn.LSTM) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)[0][:, -1]


def test_members_of_a_transformer_are_stacked() -> None:
    """The fused product of attention wants an alignment that stacked members do not have."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(48, 3, 96, 0.0, batch_first=True)
    net = nn.Sequential(nn.Linear(5, 48), block, nn.Flatten(), nn.Linear(48 * 17, 2))
    x, y = torch.randn(64, 17, 5), torch.randint(2, (64,))
    few, many = (pl.Ensemble(pl.MAP(epochs=epochs, batch_size=32), members=3) for epochs in (3, 200))
    settings = {"compile": False, "progress": False}
    stacked, alone = (pl.fit(net, (x, y), few, device=device, **settings) for device in ("cuda", "cpu"))
    torch.testing.assert_close(stacked.functions(x).cpu(), alone.functions(x), atol=2e-3, rtol=1e-2)
    assert pl.fit(net, (x, y), many, device="cuda", **settings).run["mode"] == "captured"


@pytest.mark.parametrize("small", [True, False])
def test_kept_draws_leave_the_gpu(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory they are the draws that were; in the meantime two copies are on the device at most."""
    if not small:
        monkeypatch.setattr(storage.DrawWriter, "SMALL", 0)
    net, x = nn.Linear(1000, 1000), torch.randn(64, 1000)  # 4 MB a draw
    method = pl.SGLD(epochs=80, batch_size=None, lr=1e-6, burn_in=0.5, thin=1)
    torch.cuda.reset_peak_memory_stats()
    posterior = pl.fit(net, (x, x), method, device="cuda", compile=False, progress=False)
    assert len(posterior) == 40
    assert posterior.store.stacked["weight"].is_cuda == small
    if not small:
        assert torch.cuda.max_memory_allocated() < 30 * 4 * 2**20  # 40 draws alone would be more
    trace = posterior.store.get(range(40), "cpu")["weight"][:, 0, 0]
    assert len(trace.unique()) == 40  # no draw is that of a later step
    assert posterior.predict(x[:5], draws=4).mean.is_cuda
