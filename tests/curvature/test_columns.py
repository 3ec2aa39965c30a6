"""Columns of the outputs' Fisher: roots whose longest columns come first, and what may be left out of a curvature."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.curvature import losses
from plausible.curvature.columns import Columns, Portions
from plausible.curvature.estimating import estimate
from plausible.curvature.output_fisher import Dense, Elementwise, OutputFisher, Softmax
from plausible.curvature.tally import Tally
from plausible.data import Batch, as_data
from plausible.model import Model

CPU = torch.device("cpu")


def fishers() -> dict[str, OutputFisher]:
    stream = torch.Generator().manual_seed(0)

    def logits(*shape: int) -> Tensor:
        return 4 * torch.randn(*shape, generator=stream, dtype=torch.float64)

    factor = logits(4, 3, 5, 5)
    return {
        "softmax": Softmax(logits(6, 7).softmax(-1)),
        "two classes": Softmax(logits(6, 2).softmax(-1)),
        "positions": Softmax(logits(4, 3, 5).softmax(-1) * torch.tensor([1.0, 0.0, 1.0])[:, None]),
        "elements": Elementwise(logits(4, 3, 2).exp()),
        "matrices": Dense(factor @ factor.mT, torch.Size((4, 3, 5))),
    }


@pytest.mark.parametrize("name", fishers())
def test_leading_columns_are_a_root_in_falling_order(name: str) -> None:
    fisher = fishers()[name]
    count = fisher.num_roots
    whole = fisher.leading(slice(0, count)).flatten(2)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", whole, whole), fisher.blocks())
    lengths = whole.square().sum(-1)
    assert (lengths[:-1] >= lengths[1:] - 1e-12).all()
    torch.testing.assert_close(fisher.sizes().sort(1, descending=True).values.T, lengths)
    torch.testing.assert_close(fisher.sizes().sum(1), fisher.blocks().diagonal(dim1=1, dim2=2).sum(-1))
    torch.testing.assert_close(fisher.leading(slice(1, 3)).flatten(2), whole[1:3])


def test_one_class_against_the_rest_is_the_best_first_column_of_three() -> None:
    p = torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64)
    first = Softmax(p).leading(slice(0, 1))[0, 0]
    torch.testing.assert_close(first, math.sqrt(0.7 * 0.3) * torch.tensor([-2 / 3, 1.0, -1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("doubt", [1e-3, 1e-6, 1e-12, 1e-30, 0.0])
def test_single_precision_keeps_what_is_left_of_almost_one(doubt: float) -> None:
    p = torch.tensor([[doubt * 0.3, 1.0 - doubt, doubt * 0.7]], dtype=torch.float64)
    exact, single = (Softmax(p.to(dtype)).leading(slice(0, 2)).double() for dtype in (torch.float64, torch.float32))
    assert single.isfinite().all()
    trace = doubt * (1 - doubt) + doubt - doubt**2 * (0.09 + 0.49)
    assert float(single.square().sum()) == pytest.approx(trace, rel=1e-5, abs=1e-37)
    torch.testing.assert_close(single, exact, rtol=1e-5, atol=1e-5 * math.sqrt(doubt))


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("tallied", [False, True])
def test_columns_are_made_by_slices(count: int | None, tallied: bool) -> None:
    fisher, weight = fishers()["softmax"], torch.rand(6).double()
    first = torch.randn(6, 7).double() if tallied else None
    found = Columns(fisher, count, weight, first)
    root = fisher.root() if count is None else fisher.leading(slice(0, count))
    expected = root * weight.sqrt()[:, None]
    expected = expected if first is None else torch.cat([first[None], expected])
    assert len(found) == len(expected)
    for size in (1, 2, 4, 100):
        parts = [found[start : start + size] for start in range(0, len(found), size)]
        torch.testing.assert_close(torch.cat(parts), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Examples in an order


def sure(rows: int, classes: int = 6, scale: float = 25.0) -> tuple[Model, dict[str, Tensor], Any, Tensor]:
    """A network that is sure of most examples, its weights, the data, and its logits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes)).double()
    with torch.no_grad():
        net[-1].weight.mul_(scale)
    x = torch.randn(rows, 4, dtype=torch.float64)
    data = as_data((x, torch.randint(0, classes, (rows,)), torch.rand(rows).double()), dtype=torch.float64, device=CPU)
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=rows)
    return model, {**model.initial, **model.buffers}, data, net(x).detach()


def portions(data: Any, logits: Tensor, negligible: float, size: int = 8) -> tuple[Portions, list[tuple[Batch, Any]]]:
    """Chunks of examples whose inputs are their logits."""
    likelihood = pl.likelihoods.Categorical()
    whole = as_data((logits, data.batch.y, data.batch.weight), dtype=logits.dtype, device=CPU)
    made = Portions(lambda b: losses.output_fisher(likelihood, b.x), lambda _: size, whole.all(), negligible)
    return made, list(made(whole))


@pytest.mark.parametrize("negligible", [1e-12, 1e-4, 1e-2, 0.3])
def test_what_is_left_out_is_the_shortest_and_no_more_than_asked(negligible: float) -> None:
    _, _, data, logits = sure(200)
    lengths = losses.output_fisher(pl.likelihoods.Categorical(), logits).sizes() * data.batch.weight[:, None]
    lengths = lengths.sort(1, descending=True).values
    needed = portions(data, logits, negligible)[0].needed(data.batch._replace(x=logits))
    dropped = lengths.sum() - lengths.cumsum(1).gather(1, needed[:, None] - 1).sum()
    assert dropped <= negligible * lengths.sum() * (1 + 1e-9)
    shortest = lengths.gather(1, needed[:, None] - 1)[needed > 1].min()
    spared = dropped + lengths[:, 0][lengths[:, 0] < shortest].sum()  # one column is kept of every example
    assert spared + shortest > negligible * lengths.sum()  # another column would have been too much


@pytest.mark.parametrize("rows", [3, 100, 333])
@pytest.mark.parametrize("negligible", [0.0, 1e-12, 1e-3])
def test_every_example_comes_once_with_columns_enough(rows: int, negligible: float) -> None:
    _, _, data, logits = sure(rows)
    made, found = portions(data, logits, negligible)
    total, seen = 0.0, []
    for batch, count in found:
        lengths = losses.output_fisher(pl.likelihoods.Categorical(), batch.x).sizes() * batch.weight[:, None]
        kept = lengths.sort(1, descending=True).values[:, :count]
        total += float(lengths.sum() - kept.sum())
        seen += [tuple(row) for row in torch.cat([batch.x, batch.y[:, None], batch.weight[:, None]], 1).tolist()]
    everything = torch.cat([logits, data.batch.y[:, None], data.batch.weight[:, None]], 1).tolist()
    assert sorted(seen) == sorted(tuple(row) for row in everything)
    whole = losses.output_fisher(pl.likelihoods.Categorical(), logits).sizes() * data.batch.weight[:, None]
    assert total <= 2 * negligible * float(
        whole.sum()
    )  # the first examples are judged by a mean that is not yet that of all
    assert made.used == sum(len(batch.y) * (made.columns if count is None else count) for batch, count in found)
    if negligible == 1e-3 and rows == 333:
        assert made.used < 0.6 * rows * made.columns


def test_examples_that_all_need_their_columns_stay_in_order() -> None:
    _, _, data, logits = sure(300)
    made, found = portions(data, 0.01 * logits, 1e-5)
    assert all(count is None for _, count in found)
    torch.testing.assert_close(torch.cat([batch.x for batch, _ in found]), 0.01 * logits)
    assert made.used == 300 * made.columns


@pytest.mark.parametrize("structure", ["diag", "block", "kron", "ekfac", "full"])
def test_a_curvature_in_order_is_that_of_all_columns(structure: Any) -> None:
    model, at, data, _ = sure(300, classes=12, scale=100.0)
    found = []
    for negligible in (0.0, 1e-8, 1e-3):
        tally = Tally()
        own = estimate(model, at, data, structure=structure, negligible=negligible, chunk=32, tally=tally)
        precision = {n: torch.tensor(0.7).double() for n in own.names}
        found.append((own.variances(precision, torch.tensor(1.0).double()), tally))
    exact, tally = found[0]
    assert tally.columns == 11  # of twelve classes
    assert [other.columns < 9 for _, other in found[1:]] == [True, True]
    for (variances, other), tolerance in zip(found[1:], (1e-5, 5e-2)):
        torch.testing.assert_close(other.log_likelihood, tally.log_likelihood)
        for n in exact:
            torch.testing.assert_close(other.gradient[n], tally.gradient[n])
            torch.testing.assert_close(variances[n], exact[n], rtol=tolerance, atol=0)


def test_a_curvature_loses_at_most_what_the_jacobians_make_of_the_columns() -> None:
    """H − H' is positive, and its trace below max ‖J‖² times what was left out."""
    model, at, data, logits = sure(300)
    whole, less = (
        estimate(model, at, data, structure="full", negligible=share, chunk=32).blocks[0].matrix
        for share in (0.0, 1e-2)
    )
    lost = torch.linalg.eigvalsh(whole - less)
    assert lost[0] > -1e-9 * lost[-1]
    assert float(lost.sum()) > 1e-5 * float(whole.trace())  # something was left out
    jacobian = torch.func.jacrev(lambda w: model.outputs({**at, **w}, data.batch.x))(dict(model.initial))
    largest = torch.stack([v.flatten(2).square().sum((1, 2)) for v in jacobian.values()]).sum(0).max()
    trace = (losses.output_fisher(pl.likelihoods.Categorical(), logits).sizes().sum(1) * data.batch.weight).sum()
    assert float(lost.sum()) <= 2 * 1e-2 * float(largest * trace)


def test_masked_positions_cost_nothing() -> None:
    """Sequences that end early have no columns where they ended."""
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    x, y = torch.randn(64, 5, 3).double(), torch.randint(0, 4, (64, 5))
    mask = torch.arange(5) < torch.randint(1, 3, (64, 1))
    data = as_data((x, y), dtype=torch.float64, device=CPU, mask=mask)
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=64)
    both = [estimate(model, dict(model.initial), data, structure="full", negligible=n, chunk=8) for n in (0.0, None)]
    torch.testing.assert_close(both[1].blocks[0].matrix, both[0].blocks[0].matrix)
    at = {**model.initial}
    made = Portions(
        lambda b: losses.output_fisher(model.likelihood, model.outputs(at, b.x), None, b.mask, b.y),
        lambda _: 8,
        data.all(),
        1e-9,
    )
    assert sum(len(batch.y) for batch, _ in made(data)) == 64
    assert made.used <= 64 * 2 * 3


def test_the_share_must_be_one() -> None:
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="negligible must be at least 0 and below 1"):
            pl.Laplace(negligible=bad)
