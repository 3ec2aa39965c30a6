"""Networks × methods in a small form, and what counts as which outcome."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import load, zoo
from experiments.frame import Request
from experiments.running import Folder, run, wanted
from experiments.zoo_plain import Subject, mlp, numbers

REQUEST = Request(seeds=1, device="cpu", compile=False, progress=False)


@pytest.mark.slow
def test_a_few_networks_work_with_a_few_methods(tmp_path: Path) -> None:
    found, folder = load("zoo"), Folder(tmp_path, "zoo", "tiny")
    results = run(found, "tiny", wanted(found, "tiny", ()), folder, REQUEST)
    cells = [(name, setting, cell) for name, one in results.items() for setting, cell in one["outcomes"].items()]
    assert len(cells) >= 40
    assert not [cell for cell in cells if cell[2]["outcome"] != "works"]


class Touchy(nn.Module):
    """What a module can do that a fit must not let through."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how, self.calls = mlp(), how, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "raises":
            raise LookupError("nothing there")
        if self.how == "waits":
            time.sleep(60)
        if self.how == "ends":
            raise SystemExit(3)
        return self.net(x)


@pytest.mark.parametrize(
    ("how", "outcome", "why"),
    [
        ("raises", "fails", "nothing there"),
        ("waits", "out of time", "more than 1 s"),
        ("ends", "fails", "the process ended with"),
        ("scripted", "refused", "TorchScript"),
        ("", "works", ""),
    ],
)
def test_outcomes(how: str, outcome: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def maker() -> Subject:
        return numbers(torch.jit.script(mlp()) if how == "scripted" else Touchy(how))

    monkeypatch.setitem(zoo.NETWORKS, "touchy", maker)
    found = zoo.outcomes("touchy", ("map",), 1.0 if how == "waits" else 30.0)
    assert found["map"][0] == outcome
    assert why in found["map"][1]


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def maker() -> Subject:
        return numbers(mlp())

    assert zoo.tried(maker, zoo.setting("sgld")) == ("works", "")
    monkeypatch.setattr(
        zoo.pl,
        "load",
        lambda path, network, **more: zoo.pl.fit(network, (maker().x, maker().y), zoo.setting("map"), progress=False),
    )
    outcome, why = zoo.tried(maker, zoo.setting("sgld"))
    assert (outcome, why) == ("wrong", "predictions differ after save and load")


def test_a_gradient_that_is_not_autograd_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def maker() -> Subject:
        return numbers(mlp())

    assert zoo.differentiated(maker) == ("works", "")
    gradient = zoo.Model.gradient

    def scaled(*args, **settings):
        found = gradient(*args, **settings)
        return found._replace(grads={name: 1.01 * grad for name, grad in found.grads.items()})

    monkeypatch.setattr(zoo.Model, "gradient", scaled)
    assert zoo.differentiated(maker)[0] == "wrong"


def test_modules_that_are_touched_are_found() -> None:
    network = mlp()
    before = zoo._state(network)
    assert zoo._untouched(before, network) == ""
    network.eval()
    assert "modes" in zoo._untouched(before, network)
    network.train()[0].weight.data += 1
    assert "0.weight" in zoo._untouched(before, network)
