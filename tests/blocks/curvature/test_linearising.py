"""Jacobians by layers against those of torch.func, for every kind of layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.curvature.linearising import Linearisation
from plausible.core.data import Batch
from plausible.core.model import Model
from tests.helpers.networks import NETWORKS, build

# weights that no layer explains: their Jacobians come from autograd
GENERIC = {
    "bare": {"scale"},
    "attention": {"places.weight"},
    "weight norm": {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
}


def model_of(net: nn.Module, x: Tensor, **settings: object) -> Model:
    y = torch.zeros(len(x), dtype=torch.int64)
    return Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), Batch(x, y), num_data=len(x), **settings)  # type: ignore[arg-type]


def exact(model: Model, x: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """∂f/∂w, [B, O, …], by autograd alone."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    leaves = {name: model.initial[name].clone().requires_grad_() for name in names}
    f = model.outputs({**model.initial, **model.buffers, **leaves}, x)
    for row in f:
        grads = [torch.autograd.grad(o, list(leaves.values()), retain_graph=True, allow_unused=True) for o in row]
        for i, name in enumerate(names):
            found[name].append(torch.stack([torch.zeros_like(leaves[name]) if g[i] is None else g[i] for g in grads]))
    return {name: torch.stack(value) for name, value in found.items()}


def unit(f: Tensor) -> Tensor:
    """One column for each output."""
    return torch.eye(f.shape[1], dtype=f.dtype)[:, None].expand(-1, len(f), -1)


def compare(model: Model, x: Tensor) -> Linearisation:
    at = Linearisation(model, {**model.initial, **model.buffers}, x)
    outputs, parts = at(x, unit)
    torch.testing.assert_close(outputs, model.outputs({**model.initial, **model.buffers}, x))
    expected = exact(model, x, at.names)
    seen = set()
    for part in parts:
        for name, value in part.layer.split(part.jacobian()).items():
            torch.testing.assert_close(value.transpose(0, 1), expected[name], msg=lambda m, n=name: f"{n}: {m}")
            seen.add(name)
    assert seen == set(at.names)
    return at


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_are_those_of_autograd(name: str) -> None:
    net, x = build(name)
    at = compare(model_of(net, x), x)
    assert set(at.others) == GENERIC.get(name, set())


@pytest.mark.parametrize("name", ["perceptron", "conv2d", "transposed 2d", "layer norm", "attention", "lstm"])
@pytest.mark.parametrize("where", ["*bias*", "*weight*"])
def test_some_of_the_weights(name: str, where: str) -> None:
    net, x = build(name)
    compare(model_of(net, x, where=where), x)


def test_matrices_and_weights_are_inverses() -> None:
    for name in NETWORKS:
        net, x = build(name)
        model = model_of(net, x)
        at = Linearisation(model, {**model.initial, **model.buffers}, x)
        for layer in at.all_layers:
            if layer.kind == "vector":
                continue
            weights = {n: torch.randn(2, *s) for n, s in zip(layer.names, layer.shapes)}
            back = layer.weights(layer.matrix(weights, lead=1))
            assert all(torch.equal(back[n], weights[n]) for n in layer.names)


def test_the_network_is_not_changed() -> None:
    net, x = build("in place")
    before = {n: p.clone() for n, p in net.named_parameters()}
    model = model_of(net, x)
    Linearisation(model, model.initial, x)(x, unit)
    assert all(torch.equal(before[n], p) for n, p in net.named_parameters())
