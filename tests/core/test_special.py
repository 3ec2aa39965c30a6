"""The special functions against scipy, arbitrary precision and identities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special as oracle

from plausible.core.special import betainc, flushed, stirling_error, symmetric_eigen


@pytest.mark.parametrize(("low", "high"), [(-10, -2), (-2, 2), (0, 4), (3, 6), (5, 8), (-10, 8)])
def test_betainc_agrees_with_scipy_over_eighteen_decades(low: int, high: int) -> None:
    rng = np.random.default_rng(0)
    a, b = 10 ** rng.uniform(low, high, (2, 3000))
    mean = a / (a + b)
    x = mean + 2 * rng.normal(size=a.size) * np.sqrt(mean * (1 - mean) / (a + b + 1))  # where the function moves
    x[::3] = rng.uniform(size=x[::3].size)
    x = np.clip(x, 1e-300, 1 - 1e-16)
    result = betainc(*map(torch.from_numpy, (a, b, x))).numpy()
    np.testing.assert_allclose(result, oracle.betainc(a, b, x), rtol=0, atol=1e-11)


def test_betainc_closed_forms_and_reflection() -> None:
    x = torch.linspace(0.01, 0.99, 33, dtype=torch.float64)
    for shape in (1e-6, 0.3, 1.0, 7.0, 3e4):
        s, one = torch.full_like(x, shape), torch.ones_like(x)
        torch.testing.assert_close(betainc(s, one, x), x**shape, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(betainc(one, s, x), -torch.expm1(shape * torch.log1p(-x)), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(betainc(s, 2 * s, x), 1 - betainc(2 * s, s, 1 - x), rtol=0, atol=1e-12)
        torch.testing.assert_close(betainc(s, s, 0.5 * one), 0.5 * one, rtol=0, atol=1e-12)


def test_betainc_keeps_a_tiny_lower_tail() -> None:
    a, b, x = 40.0, 3.0, 1e-6
    result = betainc(*(torch.tensor(v, dtype=torch.float64) for v in (a, b, x))).item()
    assert result == pytest.approx(oracle.betainc(a, b, x), rel=1e-11)
    assert 0 < result < 1e-200


def test_betainc_edges_broadcasting_and_types() -> None:
    a, b = torch.tensor([[0.5], [200.0]]), torch.tensor([2.0, 0.1, 30.0])
    assert betainc(a, b, torch.tensor(0.0)).tolist() == [[0.0] * 3] * 2
    assert betainc(a, b, torch.tensor(1.0)).tolist() == [[1.0] * 3] * 2
    assert betainc(a, b, torch.tensor(math.nan)).isnan().all()
    half = betainc(a, b, torch.tensor(0.5))
    assert half.dtype == torch.float32
    assert half.shape == (2, 3)
    np.testing.assert_allclose(half, oracle.betainc(a.double().numpy(), b.double().numpy(), 0.5), rtol=1e-6, atol=1e-38)


def test_betainc_takes_the_complement_where_x_rounds_to_one() -> None:
    # I_x(a, ½) with 1 − x = 1e-20: the subtraction would give exactly I_1 = 1
    a, b, y = (torch.tensor(v, dtype=torch.float64) for v in (1e18, 0.5, 1e-20))
    expected = oracle.erfc(math.sqrt(1e18 * 1e-20))  # the limit of large a: Γ(½, a·y)/Γ(½)
    assert betainc(a, b, 1 - y, y).item() == pytest.approx(expected, rel=1e-9)
    assert betainc(a, b, 1 - y).item() == 1.0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 5e-6)])
def test_stirling_error_obeys_its_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    """Γ(a+1) = aΓ(a) means Δ(a) − Δ(a+1) = (a + ½) log(1 + 1/a) − 1, on both sides of the switch at 10."""
    a = torch.logspace(-3, 1.5, 400, dtype=dtype)
    wide = a.double()
    expected = (wide + 0.5) * torch.log1p(1 / wide) - 1
    torch.testing.assert_close(
        (stirling_error(a) - stirling_error(a + 1)).double(), expected, rtol=10 * tolerance, atol=tolerance
    )
    assert stirling_error(torch.tensor(1e6, dtype=torch.float64)).item() == pytest.approx(1 / 12e6, rel=1e-9)


def test_stirling_error_has_finite_gradients_everywhere() -> None:
    a = torch.tensor([1e-30, 1e-3, 1.0, 9.99, 10.0, 1e20], requires_grad=True)
    (gradient,) = torch.autograd.grad(stirling_error(a).sum(), a)
    exact = (lambda v: oracle.digamma(v) - np.log(v) + 0.5 / v)(a.detach().double().numpy())
    np.testing.assert_allclose(gradient[1:4], exact[1:4], rtol=1e-4, atol=1e-5)
    assert gradient.isfinite().all()


def test_only_what_is_negligible_beside_the_largest_is_flushed() -> None:
    tiny = torch.finfo(torch.float32).tiny
    values = torch.tensor([1.0, -1e-18, 1e-20, -2e-20, tiny / 8, 0.0])
    assert flushed(values).tolist() == [1.0, values[1].item(), 0.0, 0.0, 0.0, 0.0]
    assert values[2] != 0  # the argument stays as it was
    for kept in (values[2:4], values.double(), torch.tensor([3, 0]), values[:0]):
        assert flushed(kept) is kept


def _gram(size: int, rank: int, scale: float) -> torch.Tensor:
    root = torch.randn(2, size, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (scale * root @ root.mT).float()


@pytest.mark.parametrize("fails", ["once", "in float32", "without jitter", "always", "NaN"])
def test_eigenvectors_are_found_where_the_library_does_not_converge(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gram = _gram(20, 3, 1e-12)
    true = torch.linalg.eigh(gram)
    calls: list[torch.Tensor] = []
    decompose = torch.linalg.eigh

    def stubborn(matrix: torch.Tensor, **settings: Any) -> Any:
        calls.append(matrix)
        number = len(calls)
        if fails == "NaN" and number == 1:
            return matrix[..., 0] * math.nan, matrix
        failing = {"once": 1, "without jitter": 4, "always": 99}.get(fails, 0)
        if number <= failing or (fails == "in float32" and matrix.dtype == torch.float32):
            raise torch.linalg.LinAlgError("The algorithm failed to converge because the input matrix is ill-conditioned")
        return decompose(matrix, **settings)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    values, vectors = symmetric_eigen(gram.triu())  # by what is above the diagonal
    assert values.dtype == vectors.dtype == torch.float32
    assert len(calls) > 1
    largest = float(gram.abs().max())
    torch.testing.assert_close(values, true.eigenvalues, rtol=1e-4, atol=1e-5 * largest)
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, gram, rtol=1e-4, atol=1e-5 * largest)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(20).expand(2, 20, 20), rtol=0, atol=1e-5)


def test_what_is_not_finite_has_no_eigenvectors() -> None:
    with pytest.raises(ValueError, match=r"the curvature is not finite.*standardise the inputs"):
        symmetric_eigen(torch.tensor([[1.0, math.inf], [math.inf, 1.0]]))
