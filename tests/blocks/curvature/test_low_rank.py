"""Leading eigenpairs: against the eigenvalues of the matrix written out, for networks that need every way to differentiate."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plausible import likelihoods, priors
from plausible.blocks.curvature import low_rank
from plausible.blocks.curvature.low_rank import leading
from plausible.blocks.curvature.products import Product
from plausible.core.data import ArrayData, Batch
from plausible.core.model import Model
from plausible.core.weights import Weights, flatten, num_elements, select, unflatten

N = 40


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def problem(
    name: str = "mlp", dtype: torch.dtype = torch.float64, likelihood: likelihoods.Likelihood | None = None, count: int = N
) -> tuple[Model, ArrayData]:
    torch.manual_seed(0)
    net, shape = {
        "mlp": lambda: (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,)),
        "conv": lambda: (nn.Sequential(nn.Conv2d(1, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(12, 3)), (1, 4, 4)),
        "lstm": lambda: (Recurrent(), (5, 2)),
    }[name]()
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=stream, dtype=torch.float64)
    y = torch.randint(3, (count,), generator=stream) if likelihood is None else x.flatten(1)[:, :3].sin()
    batch = Batch(x.to(dtype), y if likelihood is None else y.to(dtype))
    model = Model.build(net.to(dtype), likelihood or likelihoods.Categorical(), priors.Gaussian(), batch, num_data=count)
    return model, ArrayData(batch, count)


def matrix(model: Model, data: ArrayData, kind: Any = "ggn") -> Tensor:
    """The whole matrix, [P, P] (products are tested on their own)."""
    eye = torch.eye(num_elements(model.initial), dtype=next(iter(model.initial.values())).dtype)
    return flatten(Product(model, model.initial, data, kind)(unflatten(eye, model.initial)), 1).double()


def check_pairs(model: Model, whole: Tensor, values: Tensor, vectors: Weights, tolerance: float) -> None:
    exact = torch.linalg.eigvalsh(whole).flip(0)
    rows = flatten(select(vectors, model.random), 1).double()
    scale = float(exact[0])
    torch.testing.assert_close(values.double(), exact[: len(values)], atol=tolerance * scale, rtol=0)
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows), dtype=torch.float64), atol=max(tolerance, 1e-9), rtol=0)
    residual = (rows @ whole - values.double()[:, None] * rows).norm(dim=1)
    assert float(residual.max()) <= 10 * tolerance**0.5 * scale


@pytest.mark.parametrize("kind", ["ggn", "fisher", "empirical", "hessian"])
@pytest.mark.parametrize("name", ["mlp", "conv", "lstm"])
def test_pairs_are_those_of_the_matrix(name: str, kind: Any) -> None:
    model, data = problem(name)
    values, vectors = leading(model, model.initial, data, 6, kind=kind, oversample=4, tolerance=1e-8, iterations=30)
    assert len(values) == 6
    check_pairs(model, matrix(model, data, kind), values, vectors, 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_restarts_give_the_same_in_less_memory(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    model, data = problem()
    kept: list[int] = []
    monkeypatch.setattr(low_rank, "require_memory", lambda *_: 0)  # two blocks at least
    widen = low_rank._Lanczos.widen
    monkeypatch.setattr(low_rank._Lanczos, "widen", lambda self, p: (widen(self, p), kept.append(len(self.basis))))
    values, vectors = leading(model, model.initial, data, 5, oversample=5, tolerance=1e-6, iterations=60, seed=seed)
    assert max(kept) <= 20
    assert len(kept) > 4
    check_pairs(model, matrix(model, data), values, vectors, 1e-11)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_the_basis_stays_orthonormal_where_remainders_are_short(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, data = problem(name, torch.float32)
    bases: list[Tensor] = []
    widen = low_rank._Lanczos.widen
    monkeypatch.setattr(low_rank._Lanczos, "widen", lambda self, p: (widen(self, p), bases.append(self.basis)))
    leading(model, model.initial, data, 6, oversample=2, iterations=40, tolerance=0.0)
    worst = max(float((q @ q.T - torch.eye(len(q))).abs().max()) for q in bases)
    assert worst <= 8 * torch.finfo(torch.float32).eps


def test_default_tolerance_in_single_precision() -> None:
    model, data = problem(dtype=torch.float32)
    values, vectors = leading(model, model.initial, data, 10)
    assert values.dtype == torch.float32
    check_pairs(model, matrix(model, data), values, vectors, 1e-4)


@pytest.mark.parametrize("rank", [67, 500])
def test_a_rank_beyond_the_number_of_weights_gives_the_whole_matrix(rank: int) -> None:
    model, data = problem()
    assert num_elements(model.initial) == 67
    values, vectors = leading(model, model.initial, data, rank)
    whole = matrix(model, data)
    rows = flatten(vectors, 1)
    torch.testing.assert_close(rows.T @ (values[:, None] * rows), whole, atol=1e-9, rtol=0)
    assert len(values) < 67  # the outputs of a softmax have one direction that changes nothing


def test_zeros_are_left_out_where_the_data_say_less_than_the_rank() -> None:
    model, data = problem(count=5)  # at most 5 · (3 − 1) directions
    values, vectors = leading(model, model.initial, data, 30)
    assert len(values) == 10
    check_pairs(model, matrix(model, data), values, vectors, 1e-12)


def test_negative_eigenvalues_of_a_hessian_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, data = problem()
    whole = matrix(model, data, "hessian")
    exact = torch.linalg.eigvalsh(whole).flip(0)
    negative, positive = int((exact < -1e-9).sum()), int((exact > 1e-9).sum())
    assert negative > 3
    with caplog.at_level(logging.WARNING, "plausible"):
        values, vectors = leading(model, model.initial, data, 67, kind="hessian")
    assert f"{negative} negative eigenvalues of the Hessian were met and left out" in caplog.text
    assert len(values) == positive
    check_pairs(model, whole, values, vectors, 1e-12)
    caplog.clear()
    leading(model, model.initial, data, 67, kind="ggn")
    assert not caplog.text


def test_a_learned_noise_has_no_part_in_it() -> None:
    model, data = problem(likelihood=likelihoods.Gaussian())
    values, vectors = leading(model, model.initial, data, 4)
    assert set(vectors) == set(model.random)
    assert vectors["likelihood.log_scale"].shape == (4,)
    assert not vectors["likelihood.log_scale"].any()
    check_pairs(model, matrix(model, data), values, vectors, 1e-4)


def test_the_same_seed_gives_the_same_bits_and_leaves_the_generator_alone() -> None:
    model, data = problem()
    state = torch.get_rng_state()
    one, two, other = (leading(model, model.initial, data, 3, seed=seed, iterations=2)[0] for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = problem()
    for settings, message in (
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": 2.5}, "rank must be a whole number"),
        ({"rank": 3, "iterations": 0}, "iterations must be a whole number of at least 1"),
        ({"rank": 3, "oversample": -1}, "oversample must be a whole number of at least 0"),
        ({"rank": 3, "kind": "gauss"}, "kind must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            leading(model, model.initial, data, **settings)  # type: ignore[arg-type]
    broken = {name: w * torch.inf for name, w in model.initial.items()}
    with pytest.raises(ValueError, match="products with the curvature are not finite"):
        leading(model, broken, data, 3)
    monkeypatch.setattr("plausible.core.memory.available", lambda _: 1000)
    with pytest.raises(MemoryError, match=r"3 eigenpairs: about .* lower rank"):
        leading(model, model.initial, data, 3)
