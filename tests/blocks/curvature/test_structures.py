"""Structures against matrices written down in float64: what they keep of H, and what they say of Λ = s·H + diag(τ)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.curvature import losses
from plausible.blocks.curvature.estimating import estimate
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.structures import Curvature, flat
from plausible.core.data import as_data
from plausible.core.model import Model
from tests.blocks.curvature.test_linearising import exact, unit
from tests.helpers.networks import NETWORKS, build

LIKELIHOODS: dict[str, Any] = {
    "categorical": pl.likelihoods.Categorical(),
    "bernoulli": pl.likelihoods.Bernoulli(),
    "gaussian": pl.likelihoods.Gaussian(scale=0.7),
    "heteroscedastic": pl.likelihoods.HeteroscedasticGaussian(),
    "poisson": pl.likelihoods.Poisson(),
    "student": pl.likelihoods.StudentT(scale=0.5),
}


def problem(name: str, likelihood: str = "categorical", weighted: bool = True) -> tuple[Model, Any, Tensor]:
    """A model in float64, its data with example weights, and H by autograd, written down."""
    net, x = build(name)
    own = LIKELIHOODS[likelihood]
    shape = own.target_shape((len(x), 2))
    y = (
        torch.arange(len(x)) % 2
        if likelihood == "categorical"
        else (torch.arange(len(x) * 2) % 2).double()[: torch.Size(shape).numel()].reshape(shape)
    )
    weight = torch.linspace(0.5, 2.0, len(x)).double()
    data = as_data((x, y, weight) if weighted else (x, y), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, own, pl.priors.Gaussian(), data.all(), num_data=len(x))
    names = tuple(n for n in model.random if not n.startswith("likelihood."))
    jacobian = exact(model, x, names)
    f = model.outputs({**model.initial, **model.buffers}, x).detach()
    blocks = losses.blocks(own, f, model.noise(model.initial), targets=y)
    j = torch.cat([value.flatten(2) for value in jacobian.values()], -1)  # [B, O, P]
    h = torch.einsum("b,bop,boq,bqr->pr", weight if weighted else torch.ones(len(x)).double(), j, blocks, j)
    return model, data, h


def order(curvature: Curvature, model: Model) -> Tensor:
    """Where the weights of the blocks, end to end, are in the order of the model."""
    sizes = {n: model.initial[n].numel() for n in model.random}
    start, at = {}, 0
    for n in model.random:
        start[n] = at
        at += sizes[n]
    return torch.cat([torch.arange(start[n], start[n] + sizes[n]) for n in curvature.names])


def everything(curvature: Curvature) -> list[Any]:
    return [layer for block in curvature.blocks for layer in block.layers]


def matrix(curvature: Curvature, precision: dict[str, Tensor], scale: Tensor) -> Tensor:
    """Λ from its products with unit vectors, in the order of the blocks."""
    from plausible.blocks.curvature.structures import named

    layers = everything(curvature)
    return flat(layers, curvature.product(named(layers, torch.eye(curvature.size).double()), precision, scale))


def zero(model: Model) -> dict[str, Tensor]:
    return {n: torch.zeros((), dtype=torch.float64) for n in model.random}


@pytest.mark.parametrize("name", NETWORKS)
def test_full_and_diagonal_are_exact_for_every_layer(name: str) -> None:
    model, data, h = problem(name)
    weights = {**model.initial, **model.buffers}
    one = torch.ones(()).double()
    for structure in ("full", "diag", "block"):
        found = estimate(model, weights, data, structure=structure, chunk=2)  # type: ignore[arg-type]
        at = order(found, model)
        expected = h[at][:, at]
        if structure == "diag":
            expected = torch.diag(expected.diagonal())
        if structure == "block":
            owner = torch.cat([torch.full((layer.size,), i) for i, layer in enumerate(everything(found))])
            expected = expected * (owner[:, None] == owner)
        torch.testing.assert_close(matrix(found, zero(model), one), expected)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_every_likelihood(likelihood: str, structure: Any) -> None:
    model, data, h = problem("perceptron", likelihood)
    found = estimate(model, model.initial, data, structure=structure)
    expected = h if structure == "full" else torch.diag(h.diagonal())
    torch.testing.assert_close(matrix(found, zero(model), torch.ones(()).double()), expected)


@pytest.mark.parametrize("structure", ["diag", "block", "kron", "ekfac", "lowrank", "full"])
@pytest.mark.parametrize("name", ["perceptron", "conv2d", "transposed 2d", "attention", "lstm", "group norm", "bare"])
def test_all_answers_come_from_the_same_matrix(name: str, structure: Any) -> None:
    model, data, _ = problem(name)
    weights = {**model.initial, **model.buffers}
    found = estimate(model, weights, data, structure=structure, rank=5)
    scale = torch.tensor(1.3).double()
    layers = everything(found)
    precision = {n: torch.tensor(0.5 + 0.1 * i).double() for i, layer in enumerate(layers) for n in layer.names}
    whole = matrix(found, precision, scale)
    covariance = torch.linalg.inv(whole)
    torch.testing.assert_close(whole, whole.T)
    torch.testing.assert_close(found.log_det(precision, scale), torch.logdet(whole))
    variances = flat(layers, {n: v[None] for n, v in found.variances(precision, scale).items()})[0]
    torch.testing.assert_close(variances, covariance.diagonal())
    torch.manual_seed(1)
    v = {n: torch.randn(weights[n].shape).double() for n in found.names}
    line = flat(layers, {n: value[None] for n, value in v.items()})[0]
    torch.testing.assert_close(found.quadratic(v, precision, scale), line @ covariance @ line)
    from plausible.blocks.curvature.structures import named

    root = flat(layers, found.draw(named(layers, torch.eye(found.size).double()), precision, scale)).T
    torch.testing.assert_close(root @ root.T, covariance)
    at = Linearisation(model, weights, data.all().x)
    _, parts = at(data.all().x, unit)
    j = torch.cat([v.flatten(2) for v in exact(model, data.all().x, at.names).values()], -1)[..., order(found, model)]
    expected = torch.einsum("bop,pq,brq->bor", j, covariance, j)
    torch.testing.assert_close(found.covariance(parts, precision, scale), expected)
    restored = Curvature.restored(structure, found.describe(), found.tensors())
    torch.testing.assert_close(matrix(restored, precision, scale), whole)


@pytest.mark.parametrize("structure", ["diag", "block", "full"])
def test_one_precision_for_each_weight(structure: Any) -> None:
    model, data, h = problem("perceptron")
    found = estimate(model, model.initial, data, structure=structure)
    torch.manual_seed(0)
    precision = {n: torch.rand(v.shape).double() + 0.1 for n, v in model.initial.items()}
    one = torch.ones(()).double()
    added = matrix(found, precision, one) - matrix(found, zero(model), one)
    expected = torch.diag(torch.cat([precision[n].flatten() for n in found.names]))
    torch.testing.assert_close(added, expected)
    del h


def test_kronecker_factors_refuse_one_precision_for_each_weight() -> None:
    model, data, _ = problem("perceptron")
    found = estimate(model, model.initial, data, structure="kron")
    with pytest.raises(ValueError, match="structure='diag'"):
        found.log_det({n: torch.ones_like(v) for n, v in model.initial.items()}, torch.ones(()).double())


# ---------------------------------------------------------------------------------------------------------------------
# Kronecker factors


@pytest.mark.parametrize("name", ["perceptron", "conv2d"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_what_the_papers_say(name: str, sharing: Any) -> None:
    model, data, _ = problem(name)
    found = estimate(model, {**model.initial, **model.buffers}, data, structure="kron", sharing=sharing)
    batch = data.all()
    at = Linearisation(model, model.initial, batch.x)
    _, parts = at(batch.x, lambda f: losses.root(model.likelihood, f) * batch.weight.sqrt()[None, :, None])
    for block, part in zip(found.blocks, parts):
        c, r = part.columns, part.rows
        if sharing == "reduce":
            c, r = c.mean(1, keepdim=True), r.sum(2, keepdim=True)
        groups = []
        for g in range(c.shape[2]):
            a = torch.einsum("b,bti,btj->ij", batch.weight, c[:, :, g], c[:, :, g])
            b = torch.einsum("kbto,kbtp->op", r[:, :, :, g], r[:, :, :, g])
            groups.append(torch.kron(b, a) / (batch.weight.sum() * c.shape[1]))
        own = Curvature([block], "kron")
        eye = torch.eye(block.size).double().reshape(block.size, *part.layer.matrix_shape)
        product = own.product(part.layer.weights(eye), zero(model), torch.ones(()).double())
        torch.testing.assert_close(part.layer.matrix(product, lead=1).flatten(1), torch.block_diag(*groups))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_factors_are_exact_for_one_layer_and_one_example(structure: Any) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    x, y = torch.randn(1, 3).double(), torch.tensor([1])
    data = as_data((x, y), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=1)
    full = estimate(model, model.initial, data, structure="full")
    found = estimate(model, model.initial, data, structure=structure)
    one = torch.ones(()).double()
    torch.testing.assert_close(matrix(found, zero(model), one), matrix(full, zero(model), one))


def test_corrected_eigenvalues_have_the_diagonal_of_h_in_the_eigenbasis() -> None:
    """Which makes them the closest to H of all matrices with these eigenvectors; the plain ones are further away."""
    model, data, h = problem("perceptron")
    one = torch.ones(()).double()
    plain, corrected = (matrix(estimate(model, model.initial, data, structure=s), zero(model), one) for s in ("kron", "ekfac"))  # type: ignore[arg-type]
    blocks = torch.block_diag(h[:16, :16], h[16:, 16:])
    torch.testing.assert_close(corrected.trace(), blocks.trace())
    assert float((corrected - blocks).norm()) < float((plain - blocks).norm())


def test_a_last_layer_has_its_factors_without_gradients() -> None:
    """By Σ F and Σ ccᵀ, the same as by the roots of F."""
    net, x = build("perceptron")
    weight = torch.linspace(0.5, 2.0, len(x)).double()
    data = as_data((x, torch.arange(len(x)) % 2, weight), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=len(x), where="last")
    one = torch.ones(()).double()
    fast = matrix(estimate(model, model.initial, data, structure="kron"), zero(model), one)
    from plausible.blocks.curvature import estimating

    before = estimating.is_final
    estimating.is_final = lambda *_: False  # type: ignore[assignment]
    try:
        slow = matrix(estimate(model, model.initial, data, structure="kron"), zero(model), one)
    finally:
        estimating.is_final = before
    torch.testing.assert_close(fast, slow)


def test_weights_and_biases_with_other_precisions_have_factors_of_their_own() -> None:
    model, data, _ = problem("perceptron")
    precision = {n: torch.tensor(2.0 if "bias" in n else 1.0).double() for n in model.initial}
    found = estimate(model, model.initial, data, structure="kron", precision=precision)
    assert [block.names for block in found.blocks] == [("0.weight",), ("0.bias",), ("2.weight",), ("2.bias",)]
    whole = matrix(found, precision, torch.ones(()).double())
    torch.testing.assert_close(found.log_det(precision, torch.ones(()).double()), torch.logdet(whole))


# ---------------------------------------------------------------------------------------------------------------------
# Other curvatures, memory


def test_empirical_fisher_is_the_sum_of_squared_gradients() -> None:
    model, data, _ = problem("perceptron")
    batch = data.all()
    found = estimate(model, model.initial, data, structure="full", curvature="empirical")
    rows = []
    for b in range(len(batch.y)):
        leaves = {n: v.clone().requires_grad_() for n, v in model.initial.items()}
        value = model.log_likelihood(leaves, pl.Batch(batch.x[b : b + 1], batch.y[b : b + 1])).sum()
        grads = torch.autograd.grad(value, list(leaves.values()))
        rows.append(torch.cat([g.flatten() for g in grads]) * batch.weight[b].sqrt())
    j = torch.stack(rows)
    torch.testing.assert_close(matrix(found, zero(model), torch.ones(()).double()), j.T @ j)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
def test_hessian(structure: Any) -> None:
    model, data, _ = problem("perceptron")
    batch = data.all()
    names = list(model.initial)
    sizes = [model.initial[n].numel() for n in names]

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split(sizes)
        weights = {n: p.reshape(model.initial[n].shape) for n, p in zip(names, parts)}
        return -(model.log_likelihood(weights, batch) * batch.weight).sum()

    h = torch.func.hessian(loss)(torch.cat([v.flatten() for v in model.initial.values()]))
    found = matrix(
        estimate(model, model.initial, data, structure=structure, curvature="hessian"), zero(model), torch.ones(()).double()
    )
    if structure == "full":
        torch.testing.assert_close(found, h)
    elif structure == "block":
        torch.testing.assert_close(found, torch.block_diag(h[:16, :16], h[16:, 16:]))
    else:
        torch.testing.assert_close(found.diagonal(), h.diagonal().clamp(min=0))


def test_kronecker_factors_of_a_hessian_are_refused() -> None:
    model, data, _ = problem("perceptron")
    with pytest.raises(ValueError, match="no Kronecker factors"):
        estimate(model, model.initial, data, structure="kron", curvature="hessian")


def test_what_cannot_fit_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from plausible.blocks.curvature import estimating

    model, data, _ = problem("perceptron")
    monkeypatch.setattr("plausible.core.memory.available", lambda _: 1000)
    monkeypatch.setattr(estimating.Linearisation, "__call__", lambda *_: pytest.fail("the work began"))
    with pytest.raises(MemoryError, match="structure='full' needs about"):
        estimate(model, model.initial, data, structure="full")


def test_chunks_do_not_matter() -> None:
    model, data, _ = problem("conv2d")
    for structure in ("diag", "kron", "ekfac"):
        one, many = (
            matrix(
                estimate(model, {**model.initial, **model.buffers}, data, structure=structure, chunk=c),
                zero(model),
                torch.ones(()).double(),
            )  # type: ignore[arg-type]
            for c in (1, 5)
        )
        torch.testing.assert_close(one, many)


def test_reduced_factors_of_a_table_have_the_trace_of_h() -> None:
    """Where every position of an example has a row of its own, as the one-hot vectors of a linear layer would."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.stack([torch.randperm(6) for _ in range(9)])
    data = as_data((x, torch.randn(9, 1).double()), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, LIKELIHOODS["gaussian"], pl.priors.Gaussian(), data.all(), num_data=9, where="0.*")
    one = torch.ones(()).double()
    exact_trace = matrix(estimate(model, model.initial, data, structure="diag"), zero(model), one).trace()
    summed = Linearisation(model, model.initial, x)(x, lambda f: losses.root(model.likelihood, f))[1][0].rows.sum(2)
    reduced = matrix(estimate(model, model.initial, data, structure="kron", sharing="reduce"), zero(model), one).trace()
    torch.testing.assert_close(reduced, summed.square().sum() / 6)  # Σ_v (1/6)² over six rows, for the mean over examples
    assert float(reduced) != float(exact_trace)


def test_precisions_that_differ_by_rounding_share_factors() -> None:
    net = nn.Linear(3, 2)
    data = as_data((torch.randn(8, 3), torch.randint(0, 2, (8,))), dtype=torch.float32, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=8)
    tau = torch.tensor(7.137166)
    for other, blocks in ((torch.nextafter(tau, torch.tensor(9.0)), 1), (1.001 * tau, 2)):
        precision = {"weight": tau, "bias": other}
        assert len(estimate(model, dict(model.initial), data, structure="kron", precision=precision).blocks) == blocks


def test_kronecker_laplace_outlives_a_decomposition_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 300, generator=torch.Generator().manual_seed(0))  # so wide that factors are decomposed in float32
    data, net = (x, torch.arange(12) % 3), nn.Linear(300, 3)
    method = pl.Laplace(mode=pl.MAP(epochs=2, batch_size=None), structure="kron")
    usual = pl.fit(net, data, method).predict(x).probs
    decompose = torch.linalg.eigh

    def stubborn(matrix: Tensor, **settings: Any) -> Any:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return decompose(matrix, **settings)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    # the factors have rank 12 of 301: what float32 makes of the other directions differs by a little
    torch.testing.assert_close(pl.fit(net, data, method).predict(x).probs, usual, rtol=0, atol=2e-3)
