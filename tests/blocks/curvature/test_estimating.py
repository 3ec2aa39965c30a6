"""Estimators of the curvature hold nothing but tensors between two batches: one may stop and go on elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.blocks.curvature.estimating import Tally, estimate, start
from plausible.core.data import accumulate, as_data
from plausible.core.model import Model

SETTINGS: list[dict[str, Any]] = [
    *({"structure": structure} for structure in ("diag", "block", "kron", "ekfac", "full", "lowrank")),
    {"structure": "kron", "curvature": "empirical"},
    {"structure": "kron", "names": ("2.weight", "2.bias")},
    {"structure": "ekfac", "negligible": 1e-3},
    {"structure": "full", "curvature": "hessian"},
    {"structure": "diag", "curvature": "hessian"},
    {"structure": "full", "chosen": torch.tensor([0, 5, 7])},
]


def problem() -> tuple[Model, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(60, 4).double(), torch.randint(0, 3, (60,))
    data = as_data((x, y, torch.rand(60).double()), dtype=torch.float64, device=torch.device("cpu"))
    return Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=60), data


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_estimator_goes_on_where_another_one_stopped(settings: dict[str, Any]) -> None:
    model, data = problem()
    chunk = {} if settings["structure"] == "lowrank" else {"chunk": 16}
    plain = settings["structure"] == "lowrank" or settings.get("curvature") == "hessian"
    known = Tally()
    expected = estimate(model, model.initial, data, **settings, **chunk, **({} if plain else {"tally": known}))

    def fresh() -> Any:
        return start(model, model.initial, data, **settings, **chunk, **({} if plain else {"tally": Tally()}))

    estimator, more, passes = fresh(), True, 0
    while more:
        for batch in data.chunks(16):
            estimator.add(batch)
            before = {name: value.clone() for name, value in estimator.tensors().items()}
            assert all(isinstance(value, torch.Tensor) for value in before.values())
            estimator = fresh()
            estimator.restore(before)
        more, passes = estimator.next_pass(), passes + 1
    assert passes <= estimator.passes
    for name, value in expected.tensors().items():
        torch.testing.assert_close(estimator.finish().tensors()[name], value, rtol=1e-7, atol=1e-9)
    if not plain:
        assert known.log_likelihood is not None
        torch.testing.assert_close(estimator.tally.log_likelihood, known.log_likelihood)
        assert estimator.tally.columns == known.columns
        assert set(known.gradient) == set(settings.get("names") or model.random)
        for name, slope in known.gradient.items():
            torch.testing.assert_close(estimator.tally.gradient[name], slope)


def test_accumulate_adds_trees_and_numbers_over_chunks() -> None:
    _, data = problem()
    total = accumulate(lambda batch: {"x": batch.x.sum(0), "rows": len(batch.y)}, data, chunk=7)
    assert total["rows"] == 60
    torch.testing.assert_close(total["x"], data.batch.x.sum(0))
    assert accumulate(lambda _: None, data) is None
