"""A dict of likelihoods over a dict of outputs is the sum of the tasks' log-likelihoods, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.tasks import Tasks

STREAM = torch.Generator().manual_seed(0)
X = torch.randn(30, 3, generator=STREAM)
Y = {"size": X[:, 0] - X[:, 1], "kind": (X[:, 1] > 0).long() + (X[:, 2] > 0).long(), "flags": (X[:, :2] > 0).float()}
LAWS: dict[str, Any] = {
    "size": pl.likelihoods.Gaussian(),
    "kind": pl.likelihoods.Categorical(ignore_index=-100),
    "flags": pl.likelihoods.Bernoulli(),
}
SHAPES = {"size": (), "kind": (3,), "flags": (2,)}


class Heads(nn.Module):
    """A network for each task, or one body for all."""

    def __init__(self, shared: bool = False, only: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3) if shared else nn.Identity()
        self.heads = nn.ModuleDict({name: nn.Linear(3, n) for name, n in (("size", 1), ("kind", 3), ("flags", 2))})
        self.only = only

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        found = {name: head(h) for name, head in self.heads.items()}
        found["size"] = found["size"].squeeze(-1)
        return found[self.only] if self.only else found


def quick(network: nn.Module, method: Any, y: Any = Y, **settings: Any) -> Any:
    return pl.fit(network, (X, y), method, **{"likelihood": LAWS, "compile": False, "progress": False, **settings})


def test_tasks_that_share_nothing_are_fitted_as_if_alone() -> None:
    """The log joint is a sum, so that no gradient of one task sees another."""
    method = pl.MAP(epochs=20, batch_size=None, lr=0.05, patience=None)
    together = quick(Heads(), method).predict(X)
    for name, likelihood in LAWS.items():
        alone = quick(Heads(only=name), method, Y[name], likelihood=likelihood).predict(X)
        assert torch.allclose(together[name].mean, alone.mean, atol=1e-5)
        assert torch.allclose(together[name].variance, alone.variance, atol=1e-5)


def test_the_log_density_is_that_of_all_tasks_of_one_draw() -> None:
    predictive = quick(Heads(True), pl.Ensemble(pl.MAP(epochs=3), members=4)).predict(X)
    parts = []
    for name in LAWS:
        own = predictive[name]
        outputs, weights = own._draws(slice(0, 30))
        each = LAWS[name].log_prob(outputs, Y[name], weights)
        parts.append(each.flatten(2).sum(-1) if each.ndim > 2 else each)
    expected = sum(parts).logsumexp(0) - torch.tensor(4.0).log()  # type: ignore[union-attr]
    assert torch.allclose(predictive.log_prob(Y), expected.float(), atol=1e-5)


def test_ignored_classes_say_nothing() -> None:
    ignored = {**Y, "kind": torch.where(torch.arange(30) < 10, -100, Y["kind"])}
    method = pl.MAP(epochs=5, batch_size=None, patience=None)
    posterior = quick(Heads(), method, ignored)
    alone = quick(Heads(only="kind"), method, ignored["kind"], likelihood=LAWS["kind"])
    assert torch.allclose(posterior.predict(X)["kind"].probs, alone.predict(X).probs, atol=1e-5)
    assert pl.metrics.accuracy(posterior.predict(X)["kind"], ignored["kind"]) == pl.metrics.accuracy(
        alone.predict(X), ignored["kind"]
    )


@pytest.mark.parametrize(
    "method",
    [pl.MeanField(epochs=2), pl.SGLD(epochs=10), pl.NUTS(warmup=2, draws=2, chains=1), pl.Laplace(mode=pl.MAP(epochs=2))],
)
def test_files_bring_the_tasks_back(method: Any, tmp_path: Path) -> None:
    posterior = quick(Heads(True), method)
    assert "likelihood.size.log_scale" in [row[0] for row in posterior.summary().rows]
    again = pl.load(posterior.save(tmp_path / "run"), Heads(True))
    assert again.likelihood == Tasks(LAWS, SHAPES)
    for name in LAWS:
        assert torch.equal(posterior.predict(X, draws=5)[name].mean, again.predict(X, draws=5)[name].mean)


@pytest.mark.parametrize(
    ("y", "likelihood", "words"),
    [
        ({"size": Y["size"]}, LAWS, "no targets of the task 'kind'"),
        (Y["size"], LAWS, "y a dict of arrays by the names of the tasks"),
        (Y, {**LAWS, "other": LAWS["size"]}, "the outputs of the network that it names are"),
        (Y, {"size": "Gaussian"}, "likelihood of the task 'size' must be one of plausible.likelihoods"),
        ({**Y, "kind": Y["kind"] + 1}, LAWS, "task 'kind'"),
        ({**Y, "kind": Y["kind"].float()}, LAWS, "expected class numbers"),
        ({**Y, "flags": Y["flags"][:, :1]}, LAWS, r"task 'flags': targets have shape \[30, 1\], expected \[30, 2\]"),
    ],
)
def test_what_does_not_fit_is_named_by_its_task(y: Any, likelihood: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        quick(Heads(), pl.MAP(epochs=1), y, likelihood=likelihood)


def test_questions_that_need_one_law_say_whom_to_ask() -> None:
    predictive = quick(Heads(), pl.MAP(epochs=1)).predict(X)
    with pytest.raises(TypeError, match=r"several tasks have no one law: ask one of them, such as predictive\['size'\]"):
        predictive.mean  # noqa: B018
    with pytest.raises(KeyError, match="no task 'weight': its tasks are size, kind, flags"):
        predictive["weight"]
    with pytest.raises(KeyError, match="it is of one task alone"):
        predictive["size"]["size"]
