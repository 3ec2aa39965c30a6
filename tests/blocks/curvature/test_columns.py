"""Columns of the outputs' Fisher: roots whose longest columns come first, and what may be left out of a curvature."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.curvature import columns, losses
from plausible.blocks.curvature.columns import Choice, Columns, Portions
from plausible.blocks.curvature.estimating import Tally, estimate
from plausible.blocks.curvature.losses import DenseFisher, Elementwise, OutputFisher, Softmax
from plausible.core.data import ArrayData, Batch, as_data, select_rows
from plausible.core.model import Model

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
        "matrices": DenseFisher(factor @ factor.mT, torch.Size((4, 3, 5))),
    }


@pytest.mark.parametrize("name", fishers())
def test_leading_columns_are_a_root_in_falling_order(name: str) -> None:
    fisher = fishers()[name]
    count, total = fisher.num_roots, fisher.diagonal().sum(0)
    torch.testing.assert_close(fisher.diagonal().flatten(1), fisher.blocks().diagonal(dim1=1, dim2=2))
    whole = fisher.leading(slice(0, count), total).flatten(2)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", whole, whole), fisher.blocks())
    shares = (whole.square() / total.flatten().clamp(min=1e-19)).amax(-1)
    assert (shares[:-1] >= shares[1:] - 1e-12).all()
    torch.testing.assert_close(fisher.shares(total).sort(1, descending=True).values.T, shares)
    torch.testing.assert_close(fisher.leading(slice(1, 3), total).flatten(2), whole[1:3])


def test_one_class_against_the_rest_is_the_best_first_column_of_three() -> None:
    p = torch.tensor([[0.2, 0.7, 0.1]], dtype=torch.float64)
    first = Softmax(p).leading(slice(0, 1), torch.ones(1, 3))[0, 0]
    torch.testing.assert_close(first, math.sqrt(0.7 * 0.3) * torch.tensor([-2 / 3, 1.0, -1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("doubt", [1e-3, 1e-6, 1e-12, 1e-30, 0.0])
def test_single_precision_keeps_what_is_left_of_almost_one(doubt: float) -> None:
    p = torch.tensor([[doubt * 0.3, 1.0 - doubt, doubt * 0.7]], dtype=torch.float64)
    exact, single = (
        Softmax(p.to(dtype)).leading(slice(0, 2), torch.ones(1, 3)).double() for dtype in (torch.float64, torch.float32)
    )
    assert single.isfinite().all()
    trace = doubt * (1 - doubt) + doubt - doubt**2 * (0.09 + 0.49)
    assert float(single.square().sum()) == pytest.approx(trace, rel=1e-5, abs=1e-37)
    torch.testing.assert_close(single, exact, rtol=1e-5, atol=1e-5 * math.sqrt(doubt))


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("tallied", [False, True])
def test_columns_are_made_by_slices(count: int | None, tallied: bool) -> None:
    fisher, weight = fishers()["softmax"], torch.rand(6).double()
    first = torch.randn(6, 7).double() if tallied else None
    total = fisher.diagonal().sum(0)
    found = Columns(fisher, None if count is None else Choice(count, total), weight, first)
    root = fisher.root() if count is None else fishers()["softmax"].leading(slice(0, count), total)
    expected = root * weight.sqrt()[:, None]
    expected = expected if first is None else torch.cat([first[None], expected])
    assert len(found) == len(expected)
    for size in (1, 2, 4, 100):
        parts = [found[start : start + size] for start in range(0, len(found), size)]
        torch.testing.assert_close(torch.cat(parts), expected)


def test_columns_have_no_numbers_whose_squares_underflow() -> None:
    """Products with them take a CPU many times as long."""
    fisher = Softmax(torch.tensor([[0.0, -30.0, -60.0, -95.0]]).softmax(-1))
    slope = torch.tensor([[1e-3, 1e-30, 0.0, -1e-42]])
    for choice in (None, Choice(3, torch.ones(1, 4))):
        found = Columns(fisher, choice, None, slope)[0:4]
        assert found[0].tolist() == [[slope[0, 0].item(), 0.0, 0.0, 0.0]]
        assert not ((found != 0) & (found.abs() < 1e-19)).any()
        assert (found[1:] != 0).any()


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


def portions(data: Any, logits: Tensor, negligible: float, size: int = 8) -> tuple[Portions, Any]:
    """Chunks of examples whose inputs are their logits, and the data of which they are."""
    likelihood = pl.likelihoods.Categorical()
    whole = as_data((logits, data.batch.y, data.batch.weight), dtype=logits.dtype, device=CPU)
    fisher = lambda b: losses.output_fisher(likelihood, b.x)  # noqa: E731
    return Portions(fisher, lambda _: size, whole.all(), negligible), whole


def passed(made: Portions, data: Any) -> Any:
    """One pass."""
    return (piece for batch in data.chunks(made.chunk) for piece in made.of(batch))


def lost_of(batch: Batch, choice: Choice | None) -> Tensor:
    """Σ_n of what is left out of the diagonals of weighted F_n, [C], by writing all columns down."""
    fisher = losses.output_fisher(pl.likelihoods.Categorical(), batch.x)
    if choice is None:
        return torch.zeros_like(batch.x[0])
    left = fisher.leading(slice(choice.columns, fisher.num_roots), choice.total)
    return torch.einsum("kbc,b->c", left.square(), batch.weight)


@pytest.mark.parametrize("negligible", [1e-12, 1e-4, 1e-2, 0.3])
def test_what_is_left_out_has_the_smallest_shares_and_no_more_than_asked(negligible: float) -> None:
    _, _, data, logits = sure(200)
    made, whole = portions(data, logits, negligible)
    needed, lost = made.needed(whole.all())
    fisher = losses.output_fisher(pl.likelihoods.Categorical(), logits)
    total = (fisher.diagonal() * data.batch.weight[:, None, None]).sum(0)
    shares = (fisher.shares(total) * data.batch.weight[:, None]).sort(1, descending=True).values
    dropped = shares.sum() - shares.cumsum(1).gather(1, needed[:, None] - 1).sum()
    assert dropped <= negligible * (1 + 1e-9)
    rising = shares.flatten().sort().values
    spared = rising[rising.cumsum(0) <= negligible]
    assert lost == pytest.approx(float(spared.sum()), rel=1e-6, abs=1e-13)
    assert (needed == (shares >= rising[len(spared)]).sum(1).clamp(min=1)).all()  # one is kept of every example


@pytest.mark.parametrize("order", ["as it comes", "sure first", "unsure first"])
@pytest.mark.parametrize("rows", [3, 100, 999])
@pytest.mark.parametrize("negligible", [0.0, 1e-12, 1e-3])
def test_every_example_comes_once_and_no_output_loses_more_than_its_share(
    rows: int, negligible: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "MEMORY", 2**14)  # about a hundred examples are ordered together
    _, _, data, logits = sure(rows)
    logits[:, 0] -= 12  # a rare class
    diagonals = losses.output_fisher(pl.likelihoods.Categorical(), logits).diagonal()[:, 0] * data.batch.weight[:, None]
    if order != "as it comes":
        by = diagonals.sum(1).argsort(descending=order == "unsure first")
        data, logits = ArrayData(select_rows(data.batch, by), rows), logits[by]
    made, whole = portions(data, logits, negligible)
    found = list(passed(made, whole))
    seen = [row for batch, _ in found for row in torch.cat([batch.x, batch.y[:, None], batch.weight[:, None]], 1).tolist()]
    assert sorted(seen) == sorted(torch.cat([logits, data.batch.y[:, None], data.batch.weight[:, None]], 1).tolist())
    lost = torch.stack([lost_of(*one) for one in found]).sum(0)
    assert (lost <= (negligible + 1e-14) * diagonals.sum(0)).all()
    assert made.used == sum(len(batch.y) * (made.columns if own is None else own.columns) for batch, own in found)
    if negligible == 1e-3 and rows == 999:
        assert made.used < 0.8 * rows * made.columns
        assert float((lost / diagonals.sum(0)).max()) > 1e-5


def test_rows_of_a_chunk_keep_their_order() -> None:
    """Some networks need them in order, by falling lengths of sequences for instance."""
    _, _, data, logits = sure(300)
    data.batch.weight.copy_(torch.arange(300))
    made, whole = portions(data, logits, 1e-2, size=32)
    found = [batch.weight for batch, choice in passed(made, whole) if choice is not None]
    assert found
    assert all((weight.diff() > 0).all() for weight in found)


@pytest.mark.parametrize("structure", ["diag", "full", "kron"])
def test_outputs_of_small_scale_keep_their_curvature(structure: Any) -> None:
    """Counts at very different rates: what is known about the small ones is no share of what is known about the large one."""
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    with torch.no_grad():
        net.bias.copy_(torch.tensor([14.0, 0.0, 0.0, 1.0]))
    x, y = torch.randn(400, 3).double(), torch.ones(400, 4).double()
    data = as_data((x, y), dtype=torch.float64, device=CPU)
    model = Model.build(net, pl.likelihoods.Poisson(), pl.priors.Gaussian(), data.all(), num_data=400)
    found = []
    for negligible in (0.0, 1e-3):
        own = estimate(model, dict(model.initial), data, structure=structure, negligible=negligible, chunk=32)
        precision = {n: torch.tensor(1.0).double() for n in own.names}
        found.append(own.variances(precision, torch.tensor(1.0).double()))
    for n in found[0]:
        torch.testing.assert_close(found[1][n], found[0][n], rtol=2e-3, atol=0)


def test_examples_that_all_need_their_columns_stay_in_order() -> None:
    _, _, data, logits = sure(300)
    made, whole = portions(data, 0.01 * logits, 1e-5)
    found = list(passed(made, whole))
    assert all(choice is None for _, choice in found)
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
        estimate(model, at, data, structure="full", negligible=share, chunk=32).blocks[0].matrix for share in (0.0, 1e-2)
    )
    lost = torch.linalg.eigvalsh(whole - less)
    assert lost[0] > -1e-9 * lost[-1]
    assert float(lost.sum()) > 1e-5 * float(whole.trace())  # something was left out
    jacobian = torch.func.jacrev(lambda w: model.outputs({**at, **w}, data.batch.x))(dict(model.initial))
    largest = torch.stack([v.flatten(2).square().sum((1, 2)) for v in jacobian.values()]).sum(0).max()
    diagonals = losses.output_fisher(pl.likelihoods.Categorical(), logits).diagonal()[:, 0]
    trace = (diagonals.sum(1) * data.batch.weight).sum()
    assert float(lost.sum()) <= 1e-2 * float(largest * trace)


def test_masked_positions_cost_nothing() -> None:
    """Sequences that end early have no columns where they ended."""
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    x, y = torch.randn(64, 5, 3).double(), torch.randint(0, 4, (64, 5))
    mask = torch.arange(5) < torch.randint(1, 3, (64, 1))
    data = as_data((x, y), dtype=torch.float64, device=CPU, mask=mask)
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=64)
    both = [estimate(model, dict(model.initial), data, structure="full", negligible=n, chunk=8) for n in (0.0, 1e-9)]
    torch.testing.assert_close(both[1].blocks[0].matrix, both[0].blocks[0].matrix)
    at = {**model.initial}
    made = Portions(
        lambda b: losses.output_fisher(model.likelihood, model.outputs(at, b.x), None, b.mask, b.y),
        lambda _: 8,
        data.all(),
        1e-9,
    )
    assert sum(len(batch.y) for batch, _ in passed(made, data)) == 64
    assert made.used <= 64 * 2 * 3


def test_the_share_must_be_one() -> None:
    for bad in (-0.1, 1.0, float("nan"), "0.1", None, False):
        with pytest.raises(ValueError, match="negligible must be a number of at least 0 and below 1"):
            pl.Laplace(negligible=bad)  # type: ignore[arg-type]
    model, at, data, _ = sure(10)
    with pytest.raises(ValueError, match="negligible must be at least 0 and below 1, got 2"):
        estimate(model, at, data, structure="diag", negligible=2)


@pytest.mark.filterwarnings("ignore:the network is not at a mode")
def test_laplace_hands_the_share_on_and_says_what_it_took() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(400, 4), torch.randint(0, 8, (400,))
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    with torch.no_grad():
        net[-1].weight.mul_(60)
    found = [pl.fit(net, (x, y), pl.Laplace(mode=None, negligible=share, chunk=16), progress=False) for share in (0.0, 1e-2)]
    exact, spared = (posterior.diagnostics()["columns"] for posterior in found)
    assert exact == 7
    assert spared < 5.6
    covariances = [posterior.moments(x[:50])[1] for posterior in found]
    assert float((covariances[1] - covariances[0]).abs().max()) > 0
    torch.testing.assert_close(covariances[1], covariances[0], rtol=0, atol=0.02 * float(covariances[0].max()))
