"""Kinds of posterior that no method has yet fit the base class as it is: one without weights, one of many architectures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.draws import outputs_of_draws
from plausible.core.weights import Weights, index
from plausible.posteriors.base import Posterior
from plausible.posteriors.mixture import MixturePosterior
from plausible.posteriors.predictive import Draws
from plausible.posteriors.saving import Content, kinds

NOISE = 0.1


def _data(seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    x = torch.linspace(-2, 2, 30)[:, None]
    return x, torch.sin(2 * x) + NOISE * torch.randn(30, 1, generator=stream)


def _model(network: nn.Module) -> pl.Model:
    return pl.fit(network, _data(), pl.MAP(epochs=1), likelihood=pl.likelihoods.Gaussian(NOISE), progress=False).model


class Kernel(nn.Module):
    """What stands for the network of a Gaussian process: it says shapes, and is never run for a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.length * x


class ProcessPosterior(Posterior):
    """A Gaussian process: draws of f(x), and no weights that could be drawn."""

    kind = "test process"

    def __init__(self, method: Any, model: pl.Model, run: Mapping[str, Any], x: Tensor, y: Tensor, length: float):
        super().__init__(method, model, run)
        self.x, self.y, self.length = x, y, length

    def num_draws(self, draws: int | None) -> int:
        return 200 if draws is None else draws

    def _kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((a - b.T) / self.length).square())

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide, seen = x.double(), self.x.double()
        gram = self._kernel(seen, seen) + NOISE**2 * torch.eye(len(seen), dtype=torch.float64)
        solved = torch.linalg.solve(gram, self._kernel(seen, wide))
        return solved.T @ self.y.double(), self._kernel(wide, wide) - self._kernel(wide, seen) @ solved

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        """One standard normal number for each draw: right for each input on its own, and the same functions in every block."""
        mean, covariance = self.moments(inputs)
        noise = torch.randn(self.num_draws(draws), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale = covariance.diagonal().clamp(min=0).sqrt()
        return Draws((mean[:, 0] + scale * noise[:, None]).unsqueeze(-1).to(inputs.dtype), {})

    def content(self) -> Content:
        return Content({"data": {"x": self.x, "y": self.y}}, {"length": self.length})

    @classmethod
    def rebuilt(cls, method: Any, model: pl.Model, run: Mapping[str, Any], content: Content) -> Self:
        return cls(method, model, run, **content.tensors["data"], length=float(content.settings["length"]))


class JumpPosterior(Posterior):
    """Draws of perceptrons with different numbers of hidden units, as reversible jumps leave them: their weights do not stack."""

    kind = "test jump"

    def __init__(self, method: Any, model: pl.Model, run: Mapping[str, Any], draws: list[Weights]):
        super().__init__(method, model, run)
        self.stored = draws

    def num_draws(self, draws: int | None) -> int:
        return len(self.stored) if draws is None else draws

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        rows = list(range(len(self.stored)))
        if draws is not None:
            rows = torch.randint(len(rows), (draws,), generator=torch.Generator().manual_seed(seed)).tolist()
        return Draws(torch.stack([self._function(self.stored[row], inputs) for row in rows]), {})

    @staticmethod
    def _function(weights: Weights, x: Tensor) -> Tensor:
        return torch.tanh(x @ weights["0.weight"].T + weights["0.bias"]) @ weights["2.weight"].T + weights["2.bias"]

    def content(self) -> Content:
        return Content({f"draw {k}": weights for k, weights in enumerate(self.stored)}, {"draws": len(self.stored)})

    @classmethod
    def rebuilt(cls, method: Any, model: pl.Model, run: Mapping[str, Any], content: Content) -> Self:
        return cls(method, model, run, [dict(content.tensors[f"draw {k}"]) for k in range(content.settings["draws"])])


def perceptron(units: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1))


def process() -> ProcessPosterior:
    return ProcessPosterior(pl.MAP(), _model(Kernel()), {"history": {"term": [1.0]}}, *_data(), length=0.7)


def jump() -> JumpPosterior:
    torch.manual_seed(0)
    draws = [dict(perceptron(units).state_dict()) for units in (1, 3, 7, 2, 20)]
    return JumpPosterior(pl.MAP(), _model(perceptron()), {}, draws)


@pytest.fixture(autouse=True, scope="module")
def _unregister() -> Any:
    yield
    for kind in ("test process", "test jump"):
        kinds.pop(kind)


KINDS = {"process": (process, Kernel), "jump": (jump, perceptron)}


@pytest.mark.parametrize("kind", KINDS)
def test_functions_predictions_and_metrics(kind: str) -> None:
    posterior, (x, y) = KINDS[kind][0](), _data(1)
    f = posterior.functions(x)
    assert f.shape == (posterior.num_draws(None), 30, 1)
    assert torch.equal(posterior.functions(x, 7, seed=3), posterior.functions(x, 7, seed=3))
    assert posterior.functions(x, 7, seed=3).shape == (7, 30, 1)
    predictive = posterior.predict(x)
    torch.testing.assert_close(predictive.mean, f.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predictive.epistemic, f.var(0, correction=0), rtol=1e-4, atol=1e-6)
    mixture = torch.distributions.Normal(f, NOISE).log_prob(y)[..., 0].logsumexp(0) - torch.tensor(float(len(f))).log()
    torch.testing.assert_close(predictive.log_prob(y), mixture, rtol=1e-4, atol=1e-4)
    assert pl.metrics.rmse(predictive, y) == pytest.approx(float((f.mean(0) - y).square().mean().sqrt()), rel=1e-4)
    assert pl.metrics.crps(predictive, y) > 0
    assert pl.fidelity(posterior, posterior, x, draws=50).draws == 50
    assert posterior.summary()
    assert repr(posterior)
    assert "<table>" in posterior._repr_html_()
    assert "<table>" in predictive._repr_html_()
    assert posterior.diagnostics()["chains"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_saved_loaded_and_moved(kind: str, tmp_path: Path) -> None:
    make, network = KINDS[kind]
    posterior, (x, _) = make(), _data()
    posterior.log_evidence = -3.5
    loaded = pl.load(posterior.save(tmp_path / "run"), network())
    for other in (loaded, posterior.to("cpu"), loaded.to("cpu")):
        assert type(other) is type(posterior)
        assert torch.equal(other.functions(x, 9, seed=1), posterior.functions(x, 9, seed=1))
        assert other.log_evidence == -3.5
        assert other.history == posterior.history
    both = MixturePosterior(pl.MAP(), posterior.model, {}, [posterior, loaded])
    again = pl.load(both.save(tmp_path / "both"), network())
    assert torch.equal(again.functions(x), both.functions(x))
    file = tmp_path / "run" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"tensors\.safetensors is damaged"):
        pl.load(tmp_path / "run", network())


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_weights_is_refused(kind: str) -> None:
    posterior = KINDS[kind][0]()
    name = type(posterior).__name__
    with pytest.raises(TypeError, match=f"a {name} has no draws of weights, only of functions"):
        posterior.weights()
    with pytest.raises(TypeError, match=f"a {name} has no means and scales of weights"):
        posterior.prune(0.5)
    for ask in (posterior.verdict, posterior.to_arviz):
        with pytest.raises(TypeError, match=f"a {name} has no chains"):
            ask()
    with pytest.raises(TypeError, match="must be Gaussian over the weights"):
        pl.priors.Earlier(posterior)


def test_inputs_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the network could not be run on x: RuntimeError"):
        jump().predict(torch.randn(4, 3))
    with pytest.raises(ValueError, match="x is empty"):
        process().predict(torch.zeros(0, 1))


def test_a_process_finds_the_curve() -> None:
    x, y = _data()
    assert pl.metrics.rmse(process().predict(x), torch.sin(2 * x)) < NOISE  # nearer than the data themselves
    wide = process().predict(torch.tensor([[0.0], [9.0]])).epistemic
    assert float(wide[1]) > 20 * float(wide[0])
    assert float(pl.metrics.log_loss(process().predict(x), y)) < 0


# ---------------------------------------------------------------------------------------------------------------------
# f(x) of many draws


@pytest.mark.parametrize("batch_size", [None, 1, 7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_draws_in_chunks_and_inputs_in_parts(batch_size: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _) = _model(perceptron()), _data()
    drawn = model.prior.sample(model.initial, torch.Generator().manual_seed(0), 9)
    monkeypatch.setattr("plausible.core.draws.at_once", lambda *_, **__: chunk)
    asked = []

    def source(first: int, count: int) -> Weights:
        asked.append((first, count))
        return index(drawn, slice(first, first + count))

    outputs, noise = outputs_of_draws(model, source, 9, x, batch_size=batch_size)
    expected = torch.stack([model.outputs(index(drawn, k), x) for k in range(9)])
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    assert noise == {}
    assert [first for first, _ in asked] == list(range(0, 9, chunk))  # each is asked for once
    monkeypatch.setattr("plausible.core.draws.LARGE", 0)  # one by one
    torch.testing.assert_close(outputs_of_draws(model, source, 9, x, batch_size=batch_size)[0], expected, rtol=1e-5, atol=1e-6)


def test_what_all_draws_share_is_computed_once() -> None:
    seen: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.ndim if not torch._C._functorch.is_batchedtensor(self.weight) else -1)
            return super().forward(x)

    model, (x, _) = _model(nn.Sequential(Counting(1, 3), nn.Tanh(), nn.Linear(3, 1))), _data()
    last = {name: model.initial[name] for name in ("2.weight", "2.bias")}
    fixed = {name: value for name, value in model.initial.items() if name not in last}
    drawn = model.prior.sample(last, torch.Generator().manual_seed(0), 6)
    seen.clear()
    outputs, _ = outputs_of_draws(model, lambda first, count: index(drawn, slice(first, first + count)), 6, x, fixed=fixed)
    assert seen == [2]
    expected = torch.stack([model.outputs({**fixed, **index(drawn, k)}, x) for k in range(6)])
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
