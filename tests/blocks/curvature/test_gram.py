"""Sums in place: one half of symmetric ones, and columns in slices against all of them together."""

from __future__ import annotations

import pytest
import torch

import plausible as pl
from plausible.blocks.curvature import estimating
from plausible.blocks.curvature.estimating import Tally, estimate
from plausible.blocks.curvature.kronecker import eigen
from plausible.blocks.curvature.layers import add_gram, add_products
from plausible.blocks.curvature.linearising import Linearisation
from plausible.core.data import as_data
from plausible.core.model import Model
from tests.helpers.networks import NETWORKS, build


@pytest.mark.parametrize("size", [1, 7, 64, 65, 401])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_part_above_the_diagonal_is_that_of_the_sum(size: int, groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    vectors, weight = torch.randn(2, 5, 3, groups, size, dtype=dtype), torch.rand(2, 1, 1, 1, 1, dtype=dtype)
    total = torch.zeros(groups, size, size, dtype=torch.float64)
    for part, own in zip(vectors, weight):
        add_gram(total, own * part, part)
    wide, weight = vectors.double(), weight.double()
    expected = torch.einsum("kbtgi,kbtgj->gij", weight * wide, wide)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(total.triu(), expected.triu(), **tolerance)


def test_eigenvectors_ask_for_the_part_above_the_diagonal_alone() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(900, 1, 300, dtype=torch.float64)
    total = torch.zeros(1, 300, 300, dtype=torch.float64)
    add_gram(total, vectors, vectors)
    values, basis = eigen(total.triu() + torch.randn(300, 300).double().tril(-1), torch.float64)
    expected = vectors[:, 0].T @ vectors[:, 0]
    torch.testing.assert_close((basis * values[:, None]) @ basis.transpose(-1, -2), expected[None])


@pytest.mark.parametrize("groups", [1, 2])
def test_products_of_two_are_added(groups: int) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 3, groups, 5).double(), torch.randn(4, 3, groups, 2).double()
    total = torch.ones(groups, 5, 2).double()
    add_products(total, a, b)
    torch.testing.assert_close(total, 1 + torch.einsum("btgi,btgj->gij", a, b))


@pytest.mark.parametrize("name", NETWORKS)
def test_columns_in_slices_are_those_of_all_together(name: str) -> None:
    net, x = build(name, rows=5)
    data = as_data((x, torch.randint(0, 2, (5,))), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=5)
    at = Linearisation(model, {**model.initial, **model.buffers}, x)
    roots = torch.randn(5, 5, *model.output_shape, dtype=torch.float64)
    outputs, whole = at(x, lambda _: roots)
    slices = list(at.slices(x, lambda _: roots, 2))
    assert len(slices) == 3
    for found, parts in slices:
        torch.testing.assert_close(found, outputs)
        assert [part.layer for part in parts] == [part.layer for part in whole]
    for i, part in enumerate(whole):
        torch.testing.assert_close(torch.cat([parts[i].rows for _, parts in slices]), part.rows)
        for _, parts in slices:
            torch.testing.assert_close(parts[i].columns, part.columns)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_and_tally_do_not_depend_on_the_slices(
    name: str, structure: str, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = build(name, rows=7)
    y, weight = torch.randn(7, 2).double(), torch.rand(7).double() + 0.5
    data = as_data((x, y, weight), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Gaussian(scale=0.5), pl.priors.Gaussian(), data.all(), num_data=7)
    point = {**model.initial, **model.buffers}
    found = []
    for rows in (1, 10**6):  # two columns of three at a time, and all
        monkeypatch.setattr(estimating, "ROWS", rows)
        tally = Tally()
        settings = {"structure": structure, "sharing": sharing, "chunk": 3, "tally": tally}
        own = estimate(model, point, data, **settings)  # type: ignore[arg-type]
        precision = {n: torch.tensor(0.7).double() for n in own.names}
        found.append((own.variances(precision, torch.tensor(1.3).double()), tally.gradient))
    for one, other in zip(*found):
        assert one.keys() == other.keys()
        for n in one:
            torch.testing.assert_close(one[n], other[n], msg=lambda m, n=n: f"{n}: {m}")
