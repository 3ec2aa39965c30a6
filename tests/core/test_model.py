"""The model: one log joint, its gradient on both paths, which weights are random, and all kinds of modules."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import plausible as pl
from plausible import likelihoods, priors
from plausible.core import random
from plausible.core.data import Batch, Order, as_data
from plausible.core.model import Model
from plausible.posteriors.draws import DrawsPosterior

N = 12
LOG_2PI = math.log(2 * math.pi)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=stream(seed), dtype=dtype)


def mlp(inputs: int = 3, outputs: int = 1, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def build(
    network: nn.Module, x: Any, y: Tensor, likelihood: Any = None, prior: Any = None, num_data: int | None = None, **more: Any
) -> Model:
    likelihood = likelihood or likelihoods.infer(y)
    prior = priors.as_prior(prior)
    mask = more.pop("mask", None)
    return Model.build(network, likelihood, prior, Batch(x, y, None, mask), num_data=num_data or len(y), **more)


def quick(network: nn.Module, data: Any, method: Any = None, **settings: Any) -> Any:
    method = method or pl.MAP(epochs=2, batch_size=None, lr=0.01)
    return pl.fit(network, data, method, **{"compile": False, "progress": False, **settings})


def gradient(model: Model, weights: dict[str, Tensor], batch: Batch, **settings: Any) -> dict[str, Tensor]:
    return model.gradient(weights, batch, train=False, **settings).grads


def close(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)  # type: ignore[arg-type,misc]


# ---------------------------------------------------------------------------------------------------------------------
# The log joint


def test_log_likelihood_is_per_example() -> None:
    network, x, y = mlp(), randn(N, 3), randn(N, 1, seed=1)
    model = build(network, x, y, likelihoods.Gaussian(scale=0.5))
    expected = torch.distributions.Normal(network(x), 0.5).log_prob(y).squeeze(1)
    torch.testing.assert_close(model.log_likelihood(model.initial, Batch(x, y)), expected)
    both = build(mlp(outputs=2), x, randn(N, 2), likelihoods.Gaussian(scale=0.5))
    assert both.log_likelihood(both.initial, Batch(x, randn(N, 2))).shape == (N,)  # outputs are summed
    classes = torch.arange(N) % 3
    logits = mlp(outputs=3)
    model = build(logits, x, classes)
    expected = logits(x).log_softmax(-1)[torch.arange(N), classes]
    torch.testing.assert_close(model.log_likelihood(model.initial, Batch(x, classes)), expected)


def test_example_weights_do_not_enter_the_log_likelihood_per_example() -> None:
    x, y = randn(N, 3), randn(N, 1, seed=1)
    model = build(mlp(), x, y)
    plain = model.log_likelihood(model.initial, Batch(x, y))
    assert torch.equal(model.log_likelihood(model.initial, Batch(x, y, torch.rand(N).double())), plain)


def test_the_log_joint_is_likelihood_plus_prior_in_nats() -> None:
    network, x, y = mlp(), randn(N, 3), randn(N, 1, seed=1)
    model = build(network, x, y, likelihoods.Gaussian(scale=0.5), priors.Gaussian(scale=2.0))
    flat = torch.cat([p.flatten() for p in network.parameters()])
    prior = -0.5 * (flat / 2).square().sum() - len(flat) * (math.log(2) + 0.5 * LOG_2PI)
    likelihood = torch.distributions.Normal(network(x), 0.5).log_prob(y).sum()
    torch.testing.assert_close(model.log_prior(model.initial), prior)
    torch.testing.assert_close(model.log_joint(model.initial, Batch(x, y)), likelihood + prior)


def test_a_learned_noise_is_a_weight_with_a_prior() -> None:
    network, x, y = mlp(), randn(N, 3), randn(N, 1, seed=1)
    model = build(network, x, y, likelihoods.Gaussian())
    assert model.random[-1] == "likelihood.log_scale"
    weights = {**model.initial, "likelihood.log_scale": torch.tensor(0.3, dtype=torch.float64)}
    less = {name: w for name, w in weights.items() if not name.startswith("likelihood.")}
    torch.testing.assert_close(
        model.log_prior(weights) - priors.Default().log_prob(less),
        torch.distributions.Normal(0.0, 1.0).log_prob(torch.tensor(0.3, dtype=torch.float64)),
    )
    expected = torch.distributions.Normal(network(x), math.exp(0.3)).log_prob(y).squeeze(1)
    torch.testing.assert_close(model.log_likelihood(weights, Batch(x, y)), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_average_to_the_full_log_joint(size: int) -> None:
    """Over all subsets of one size the estimate has the full log joint, and its gradient, as its mean: N/B is right."""
    count = 5
    x, y, weight = randn(count, 3), randn(count, 1, seed=1), torch.rand(count, generator=stream()).double()
    model = build(mlp(), x, y)
    full = Batch(x, y, weight)
    values, grads = [], []
    for rows in itertools.combinations(range(count), size):
        index = list(rows)
        batch = Batch(x[index], y[index], weight[index])
        values.append(model.log_joint(model.initial, batch))
        grads.append(gradient(model, model.initial, batch))
    torch.testing.assert_close(torch.stack(values).mean(), model.log_joint(model.initial, full))
    mean = {name: torch.stack([g[name] for g in grads]).mean(0) for name in grads[0]}
    close(mean, gradient(model, model.initial, full))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y"),
    [
        (likelihoods.Gaussian(), 1, randn(N, 1, seed=1)),
        (likelihoods.HeteroscedasticGaussian(), 4, randn(N, 2, seed=1)),
        (likelihoods.Categorical(), 3, torch.arange(N) % 3),
        (likelihoods.Poisson(), 1, (torch.arange(N) % 4).double()[:, None]),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, likelihoods.Likelihood) else "",
)
def test_weight_two_is_the_row_twice_and_weight_zero_the_row_gone(likelihood: Any, outputs: int, y: Tensor) -> None:
    x = randn(N, 3)
    network = mlp(outputs=outputs)
    weight = torch.tensor([2.0] * 4 + [1.0] * 5 + [0.0] * 3, dtype=torch.float64)
    rows = [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    model = build(network, x, y, likelihood)
    copies = build(network, x[rows], y[rows], likelihood)
    weighted, repeated = Batch(x, y, weight), Batch(x[rows], y[rows])
    weights = {name: w + 0.1 for name, w in model.initial.items()}
    torch.testing.assert_close(model.log_joint(weights, weighted), copies.log_joint(weights, repeated))
    close(gradient(model, weights, weighted), gradient(copies, weights, repeated))


MASKED: list[tuple[Any, int, Tensor, Any]] = [
    (likelihoods.Gaussian(scale=0.7), 2, randn(N, 2, seed=1), 1e3),
    (likelihoods.Gaussian("per-output"), 2, randn(N, 2, seed=1), -5.0),
    (likelihoods.StudentT(), 2, randn(N, 2, seed=1), 1e8),
    (likelihoods.HeteroscedasticGaussian(), 4, randn(N, 2, seed=1), 9.0),
    (likelihoods.Categorical(), 3, torch.arange(N) % 3, 1),
    (likelihoods.Bernoulli(), 2, (randn(N, 2, seed=1) > 0).double(), 1.0),
    (likelihoods.Poisson(), 2, (randn(N, 2, seed=1) * 2).round().abs(), 50.0),
    (likelihoods.NegativeBinomial(), 2, (randn(N, 2, seed=1) * 2).round().abs(), 50.0),
]


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "other"), MASKED, ids=[f"{type(case[0]).__name__}-{case[1]}" for case in MASKED]
)
def test_masked_targets_have_no_influence(likelihood: Any, outputs: int, y: Tensor, other: Any) -> None:
    x = randn(N, 3)
    mask = torch.rand(y.shape, generator=stream(4)) < 0.7
    mask[0], mask[1:3] = True, False  # one row observed, two hidden
    model = build(mlp(outputs=outputs), x, y, likelihood, mask=mask)
    weights = {name: w + 0.05 for name, w in model.initial.items()}
    batch = Batch(x, y, None, mask)
    changed = batch._replace(y=torch.where(mask, y, torch.full_like(y, other)))
    dist = likelihood(model.outputs(weights, x), model.noise(weights))
    each = torch.where(mask, dist.log_prob(y.double()), 0.0)
    expected = each.flatten(1).sum(1) if each.ndim > 1 else each
    torch.testing.assert_close(model.log_likelihood(weights, batch), expected)
    assert float(model.log_likelihood(weights, batch)[1:3].abs().max()) == 0
    torch.testing.assert_close(model.log_joint(weights, batch), expected.sum() + model.log_prior(weights))
    assert torch.equal(model.log_joint(weights, changed), model.log_joint(weights, batch))
    close(gradient(model, weights, changed), gradient(model, weights, batch), rtol=0, atol=0)
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    dist = likelihood(model.outputs(leaves, x), model.noise(leaves))
    (dist.log_prob(y.double())[mask].sum() + model.log_prior(leaves)).backward()
    close(gradient(model, weights, batch), {name: w.grad for name, w in leaves.items()})  # type: ignore[misc]


def test_masks_and_example_weights_multiply() -> None:
    x, y = randn(N, 3), randn(N, 2, seed=1)
    mask, weight = randn(N, 2, seed=2) > 0, torch.rand(N, generator=stream()).double()
    model = build(mlp(outputs=2), x, y, likelihoods.Gaussian(scale=1.0), num_data=3 * N)
    each = torch.distributions.Normal(model.outputs(model.initial, x), 1.0).log_prob(y)
    expected = 3 * (each * mask * weight[:, None]).sum() + model.log_prior(model.initial)
    torch.testing.assert_close(model.log_joint(model.initial, Batch(x, y, weight, mask)), expected)


def test_targets_that_would_broadcast_are_refused() -> None:
    x = randn(N, 3)
    with pytest.raises(ValueError, match=r"y\.unsqueeze\(-1\)"):
        build(mlp(), x, randn(N))
    with pytest.raises(ValueError, match=r"y\.squeeze\(-1\)"):
        build(nn.Sequential(mlp(), nn.Flatten(0)), x, randn(N, 1))


@pytest.mark.parametrize("temperature", [0.1, 3.0])
def test_tempered(temperature: float) -> None:
    x, y = randn(N, 3), randn(N, 1, seed=1)
    for prior in (priors.Gaussian(0.5), priors.Laplace()):
        model = build(mlp(), x, y, prior=prior)
        cold = model.tempered(temperature)
        weights, batch = model.initial, Batch(x, y)
        torch.testing.assert_close(cold.log_joint(weights, batch), model.log_joint(weights, batch) / temperature)
        expected = {name: g / temperature for name, g in gradient(model, weights, batch).items()}
        close(gradient(cold, weights, batch), expected)
        joint = cold.gradient(weights, batch, train=False)
        torch.testing.assert_close(joint.value, cold.log_joint(weights, batch))
        torch.testing.assert_close(joint.log_prior, model.log_prior(weights))  # the terms themselves stay in nats
        left = cold.gradient(weights, batch, train=False, leave_l2=True, scale=-0.3)
        close(
            {n: g + left.l2.get(n, 0.0) * weights[n] for n, g in left.grads.items()}, {n: -0.3 * g for n, g in expected.items()}
        )
        assert cold.tempered(2.0).temperature == pytest.approx(2 * temperature)
        assert model.temperature == 1.0


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        build(mlp(), randn(N, 3), randn(N, 1)).tempered(temperature)


# ---------------------------------------------------------------------------------------------------------------------
# The gradient: autograd on leaves (eager) and torch.func (transformed) are one function


class Normed(nn.Module):
    """Batch norm in the middle, so that a step moves buffers."""

    def __init__(self, outputs: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def transformed_gradient(model: Model, weights: dict[str, Tensor], batch: Batch, **settings: Any) -> pl.model.Joint:  # type: ignore[name-defined]
    """The same call as inside an ensemble: under vmap, over one member."""
    buffers = settings.pop("buffers", {})

    def one(w: dict[str, Tensor], b: dict[str, Tensor]) -> Any:
        joint = model.gradient(w, batch, buffers=b, **settings)
        return joint._replace(l2={name: torch.as_tensor(value, dtype=torch.float64) for name, value in joint.l2.items()})

    up = lambda tensors: {name: t[None] for name, t in tensors.items()}  # noqa: E731
    joint = torch.func.vmap(one, randomness="different")(up(weights), up(buffers)) if buffers else None
    if joint is None:
        joint = torch.func.vmap(lambda w: one(w, {}), randomness="different")(up(weights))
    down = lambda tree: {name: t[0] for name, t in tree.items()}  # noqa: E731
    return type(joint)(
        joint.value[0], joint.log_likelihood[0], joint.log_prior[0], down(joint.grads), down(joint.buffers), down(joint.l2)
    )


PRIORS = {
    "gaussian": priors.Gaussian(0.7),
    "off-centre": priors.Gaussian(0.7, loc=0.3),
    "laplace": priors.Laplace(0.4),
    "student": priors.StudentT(),
    "flat": priors.Flat(),
    "by-name": {"*.bias": priors.Flat(), "likelihood.*": priors.Gaussian(2.0), "*": priors.FanIn(priors.Gaussian(0.8))},
    "patterns": {"*.bias": priors.Laplace(2.0), "likelihood.*": priors.Gaussian(0.3), "*": priors.FanIn(priors.Gaussian())},
}
CASES: dict[str, tuple[Any, int, Tensor]] = {
    "fixed": (likelihoods.Gaussian(scale=0.5), 1, randn(N, 1, seed=1)),
    "learned": (likelihoods.Gaussian(), 1, randn(N, 1, seed=1)),
    "per-output": (likelihoods.Gaussian("per-output"), 2, randn(N, 2, seed=1)),
    "student": (likelihoods.StudentT(), 1, randn(N, 1, seed=1)),
    "categorical": (likelihoods.Categorical(), 3, torch.arange(N) % 3),
    "counts": (likelihoods.NegativeBinomial(), 1, (torch.arange(N) % 5).double()[:, None]),
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("case", CASES)
def test_both_paths_give_one_gradient(prior: str, case: str) -> None:
    likelihood, outputs, y = CASES[case]
    x = randn(N, 3)
    network = Normed(outputs).double()
    model = build(network, x, y, likelihood, PRIORS[prior], num_data=40).tempered(1.7)
    weights = {name: w + 0.1 * randn(*w.shape, seed=5) for name, w in model.initial.items()}
    for batch in (Batch(x, y), Batch(x, y, torch.rand(N, generator=stream()).double(), randn(*y.shape, seed=3) > -1)):
        for leave_l2 in (False, True):
            settings: dict[str, Any] = {"buffers": model.buffers, "scale": -0.25, "leave_l2": leave_l2}
            eager = model.gradient(weights, batch, **settings)
            func = transformed_gradient(model, weights, batch, **settings)
            for name in ("value", "log_likelihood", "log_prior"):
                torch.testing.assert_close(getattr(eager, name), getattr(func, name))
            assert eager.l2 == pytest.approx({name: float(value) for name, value in func.l2.items()})
            close(eager.grads, func.grads)
            close(eager.buffers, func.buffers)
        # and both are the gradient of the log joint itself
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        moved = {name: b.clone() for name, b in model.buffers.items()}
        total = model.log_joint({**leaves, **moved}, batch, train=True)
        torch.testing.assert_close(eager.value, total.detach())
        found = torch.autograd.grad(-0.25 * total, list(leaves.values()), materialize_grads=True)
        close({n: g + eager.l2.get(n, 0.0) * weights[n] for n, g in eager.grads.items()}, dict(zip(leaves, found)))
        close(eager.buffers, moved)


def test_the_gradient_leaves_its_arguments_alone() -> None:
    x, y = randn(N, 3), randn(N, 1, seed=1)
    model = build(Normed().double(), x, y)
    weights = {name: w.clone() for name, w in model.initial.items()}
    buffers = {name: b.clone() for name, b in model.buffers.items()}
    joint = model.gradient(weights, Batch(x, y), buffers=buffers)
    close(weights, model.initial, rtol=0, atol=0)
    close(buffers, model.buffers, rtol=0, atol=0)
    assert not any(w.requires_grad for w in (*weights.values(), *joint.grads.values(), joint.value))
    assert not torch.equal(joint.buffers["norm.running_mean"], buffers["norm.running_mean"])
    own = dict(model.network.named_parameters())  # nothing of the call is left in the private copy
    assert all(isinstance(p, nn.Parameter) for p in own.values())
    close({n: own[n].detach() for n in own}, {n: model.initial[n] for n in own}, rtol=0, atol=0)
    assert int(model.network.norm.num_batches_tracked) == 0  # type: ignore[union-attr,arg-type]


def test_evaluations_do_not_remember_each_other() -> None:
    """Weights that share one tensor, or that carry a graph, leave no trace in later calls, copies or moves."""
    x, y = randn(N, 2), randn(N, 2, seed=1)
    model = build(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double(), x, y)
    before = model.log_joint(model.initial, Batch(x, y))
    shared = torch.eye(2, dtype=torch.float64)
    graph = (shared.requires_grad_() * 2).sin()
    model.outputs({**model.initial, "0.weight": graph, "1.weight": graph}, x)
    moved = model.tempered(1.0).to("cpu")  # copies the network
    assert torch.equal(moved.log_joint(model.initial, Batch(x, y)), before)
    names = [name for name, _ in moved.network.named_parameters()]
    assert names == ["0.weight", "1.weight"]


def test_two_models_of_one_network_are_independent() -> None:
    x, y = randn(N, 3), randn(N, 1)
    network = mlp()
    one = build(network, x, y)
    other = build(network, x, y)
    one.log_joint({name: w + 1 for name, w in one.initial.items()}, Batch(x, y))
    close(other.initial, build(network, x, y).initial, rtol=0, atol=0)
    assert torch.equal(other.outputs(other.initial, x), network(x))


# ---------------------------------------------------------------------------------------------------------------------
# Which weights are random


def chosen(network: nn.Module, where: Any, x: Any = None, y: Tensor | None = None, **more: Any) -> list[str]:
    x = randn(N, 3) if x is None else x
    y = randn(N, 1) if y is None else y
    return list(build(network, x, y, where=where, **more).random)


def test_where_by_patterns() -> None:
    network = mlp()
    everything = ["0.weight", "0.bias", "2.weight", "2.bias", "likelihood.log_scale"]
    assert chosen(network, None) == everything
    assert chosen(network, "all") == everything
    assert chosen(network, "*") == everything
    assert chosen(network, "*.bias") == ["0.bias", "2.bias"]
    assert chosen(network, "2.*") == ["2.weight", "2.bias"]
    assert chosen(network, ["2.bias", "0.*"]) == ["0.weight", "0.bias", "2.bias"]
    assert chosen(network, {"0.bias", "likelihood.*"}) == ["0.bias", "likelihood.log_scale"]
    assert chosen(network, "[0-1].weight") == ["0.weight"]
    model = build(network, randn(N, 3), randn(N, 1), where="2.*")
    assert model.points == ("0.weight", "0.bias", "likelihood.log_scale")


def test_where_by_predicates() -> None:
    import re

    network = mlp()
    assert chosen(network, lambda name: name.endswith("bias")) == ["0.bias", "2.bias"]
    assert chosen(network, lambda name, weight: weight.ndim == 2) == ["0.weight", "2.weight"]
    assert chosen(network, lambda name, weight=None: weight.numel() == 12) == ["0.weight"]
    assert chosen(network, re.compile("2").search) == ["2.weight", "2.bias"]  # more arguments, all but one optional
    assert chosen(network, {"0.bias", "2.bias"}.__contains__) == ["0.bias", "2.bias"]


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("3.*", ValueError, r"where='3\.\*' matches no weight; the names are 0\.weight, 0\.bias"),
        (["0.*", "last"], ValueError, "where='last' matches no weight"),
        ([], ValueError, "makes no weight of the network random"),
        (lambda name: False, ValueError, "makes no weight of the network random"),
        ("likelihood.*", ValueError, "makes no weight of the network random"),
        (3, TypeError, "where must be"),
        ([0, 1], TypeError, "where must be"),
    ],
)
def test_bad_where_is_refused(where: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chosen(mlp(), where)


class Backwards(nn.Module):
    """Registers its layers in the opposite order of their use; a side branch runs last but is not part of f(x)."""

    def __init__(self, head_bias: bool = True):
        super().__init__()
        self.head, self.body, self.side = nn.Linear(4, 1, bias=head_bias), nn.Linear(3, 4), nn.Linear(4, 1)
        self.token = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x) + self.token)
        return self.head(hidden), self.side(hidden)


class Bare(nn.Module):
    """The last operation uses bare parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.zeros(1))
        self.body = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x)) @ self.weight.T + self.bias


class Tied(nn.Module):
    """Word numbers → logits over words, the decoder sharing the embedding's weight."""

    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 3)
        self.mix = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 5, bias=bias)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.mix(self.embedding(x)).mean(1)))


def test_last_goes_by_execution() -> None:
    noise = ["likelihood.log_scale"]
    assert chosen(mlp(), "last") == ["2.weight", "2.bias", *noise]
    first = {"output": lambda o: o[0]}
    assert chosen(Backwards().double(), "last", **first) == ["head.weight", "head.bias", *noise]
    assert chosen(Backwards(head_bias=False).double(), "last", **first) == ["head.weight", *noise]
    assert chosen(Backwards().double(), "last", output=lambda o: o[1]) == ["side.weight", "side.bias", *noise]
    assert chosen(Bare().double(), "last") == ["weight", "bias", *noise]
    words, targets = torch.randint(5, (N, 4), generator=stream()), torch.arange(N) % 5
    assert chosen(Tied(), "last", words, targets) == ["embedding.weight", "decoder.bias"]
    assert chosen(Tied(bias=False), "last", words, targets) == ["embedding.weight"]


def test_last_passes_over_frozen_layers_and_sees_through_parametrisations() -> None:
    network = mlp()
    network[2].requires_grad_(False)
    assert chosen(network, "last") == ["0.weight", "0.bias", "likelihood.log_scale"]
    network = mlp()
    parametrizations.weight_norm(network[2])
    names = [f"2.parametrizations.weight.original{i}" for i in (0, 1)]
    assert sorted(chosen(network, "last")) == sorted(["2.bias", *names, "likelihood.log_scale"])
    bare = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    parametrizations.weight_norm(bare[0])
    assert len(chosen(bare, "last")) == 3


class Two(nn.Module):
    """f(x) = a·x₁ + b·x₂, as two named weights."""

    def __init__(self, a: float = 0.0, b: float = 0.0):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([a])), nn.Parameter(torch.tensor([b]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.a + x[:, 1:] * self.b


def two_weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Correlated inputs; the precision [2, 2] and the mean [2] of the posterior under unit noise and a unit prior."""
    x = randn(20, 2, dtype=torch.float32)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([[1.0], [-1.0]]) + randn(20, 1, seed=1, dtype=torch.float32)
    precision = x.T.double() @ x.double() + torch.eye(2, dtype=torch.float64)
    return x, y, precision, torch.linalg.solve(precision, x.T.double() @ y.double()).squeeze(1)


def chains(network: nn.Module, data: Any, lr: float, members: int = 1000, steps: int = 100, **settings: Any) -> Any:
    """The last states of many independent SGLD chains: independent draws of the stationary law."""
    method = pl.SGLD(epochs=steps, batch_size=None, lr=lr, burn_in=1 - 1 / steps, thin=1)
    model = {"likelihood": likelihoods.Gaussian(scale=1.0), "prior": priors.Gaussian()}
    settings = {**model, "compile": False, "progress": False, **settings}
    return pl.fit(network, data, pl.Ensemble(method, members=members, init="given"), **settings)


def check_law(draws: Tensor, mean: float, variance: float) -> None:
    """Mean and variance of independent normal draws, at five standard errors."""
    count = len(draws)
    assert abs(float(draws.mean()) - mean) < 5 * math.sqrt(variance / count)
    assert abs(float(draws.var()) / variance - 1) < 5 * math.sqrt(2 / count)


def test_a_frozen_weight_leaves_the_conditional_posterior() -> None:
    x, y, precision, _ = two_weights()
    network = Two(b=-0.4)
    network.b.requires_grad_(False)
    lr = 0.1 / float(precision[0, 0])
    posterior = chains(network, (x, y), lr)
    assert posterior.model.random == ("a",)
    residual = y + 0.4 * x[:, 1:]
    conditional = float((x[:, :1] * residual).sum()) / float(precision[0, 0])
    variance = 1 / float(precision[0, 0]) / (1 - 0.1 / 4)  # known bias of the step size
    check_law(posterior.weights()["a"].flatten(), conditional, variance)
    f = posterior.functions(x)  # and the frozen weight still acts
    torch.testing.assert_close(f[:, :, 0], posterior.weights()["a"] * x[:, 0] - 0.4 * x[:, 1])


def test_weights_trained_as_points_carry_no_noise_of_their_own() -> None:
    """δ' = (I − εΛ/2)δ + √ε ξ e₁: the stationary covariance solves Σ = AΣAᵀ + ε e₁e₁ᵀ, the mean is the mode."""
    x, y, precision, mean = two_weights()
    lr = 1.0 / float(torch.linalg.eigvalsh(precision).max())
    posterior = chains(Two(*mean.tolist()), (x, y), lr, where="a")
    drift = torch.eye(2, dtype=torch.float64) - lr / 2 * precision
    noise = torch.zeros(4, dtype=torch.float64)
    noise[0] = lr
    covariance = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - torch.kron(drift, drift), noise).view(2, 2)
    both = torch.linalg.inv(precision)
    assert float(covariance[1, 1] / both[1, 1]) < 0.5  # the two laws are far apart
    assert list(posterior.weights()) == ["a"]
    stored = posterior.store.get(list(range(1000)), "cpu")
    check_law(stored["a"].flatten(), float(mean[0]), float(covariance[0, 0]))
    check_law(stored["b"].flatten(), float(mean[1]), float(covariance[1, 1]))


def test_points_with_orthogonal_inputs_do_not_move_at_all_once_there() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(6, 1)
    y = torch.ones(12, 1)
    posterior = chains(Two(), (x, y), 0.1, where="a", members=50)
    stored = posterior.store.get(list(range(50)), "cpu")
    assert float(stored["a"].std()) > 0.1
    assert float(stored["b"].std()) < 1e-6  # trained: it moved to 6/7, without noise
    torch.testing.assert_close(stored["b"].mean(), torch.tensor(6 / 7), atol=1e-3, rtol=0)


def test_frozen_parameters_stay_and_nothing_of_them_is_kept() -> None:
    network = mlp(dtype=torch.float32)
    network[0].weight.requires_grad_(False)
    x, y = randn(N, 3).float(), randn(N, 1).float()
    posterior = quick(network, (x, y), pl.Ensemble(pl.MAP(epochs=3, batch_size=4), members=2))
    assert "0.weight" not in posterior.model.initial
    assert torch.equal(posterior.model.network[0].weight, network[0].weight)
    assert "0.weight" not in posterior.weights()
    assert not torch.equal(posterior.weights()["0.bias"][0], network[0].bias)


# ---------------------------------------------------------------------------------------------------------------------
# Tied weights


def test_tied_weights_are_counted_once_and_stay_tied() -> None:
    words, targets = torch.randint(5, (N, 4), generator=stream()), torch.arange(N) % 5
    network = Tied()
    model = build(network, words, targets, prior=priors.Gaussian(0.5))
    assert list(model.initial) == ["embedding.weight", "mix.weight", "mix.bias", "decoder.bias"]
    count = sum(w.numel() for w in model.initial.values())
    flat = torch.cat([w.flatten() for w in model.initial.values()])
    prior = -2 * flat.square().sum() - count * (math.log(0.5) + 0.5 * LOG_2PI)
    torch.testing.assert_close(model.log_prior(model.initial), prior)
    joint = model.gradient(model.initial, Batch(words, targets))
    loss = -F.cross_entropy(network(words), targets, reduction="sum")
    own = torch.autograd.grad(loss, list(network.parameters()))  # both uses of the weight
    close(joint.grads, {n: g - 4 * model.initial[n] for (n, _), g in zip(network.named_parameters(), own)})
    close(joint.grads, transformed_gradient(model, model.initial, Batch(words, targets)).grads)
    stacked = {name: torch.stack([w, 2 * w]) for name, w in model.initial.items()}
    vmapped = torch.func.vmap(lambda w: model.outputs(w, words))(stacked)
    with torch.no_grad():
        network.embedding.weight.mul_(2)
        network.mix.weight.mul_(2)
        network.mix.bias.mul_(2)
        network.decoder.bias.mul_(2)
    torch.testing.assert_close(vmapped[1], network(words))


@pytest.mark.parametrize("members", [None, 2])
def test_tied_weights_stay_tied_in_training(members: int | None) -> None:
    words, targets = torch.randint(5, (N, 4), generator=stream()), torch.arange(N) % 5
    one = pl.MAP(epochs=3, batch_size=None, lr=0.05)
    posterior = quick(Tied(), (words, targets), one if members is None else pl.Ensemble(one, members))
    for draw in range(len(posterior)):
        network = Tied()
        weights = {name: w[draw] for name, w in posterior.weights().items()}
        network.load_state_dict({**weights, "decoder.weight": weights["embedding.weight"]})
        torch.testing.assert_close(posterior.functions(words)[draw], network(words))
    assert str(posterior.summary()).count("embedding.weight") == 1
    assert "decoder.weight" not in str(posterior.summary())


# ---------------------------------------------------------------------------------------------------------------------
# Inputs and outputs of any structure


class Sum(nn.Module):
    """Counts on inputs a and b, in whatever way `forward` takes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(2, 1), nn.Linear(3, 1)

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) + self.two(b)


class ByKeyword(Sum):
    def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
        return self.total(a, b)


class ByArguments(Sum):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.total(a, b)


class ByDict(Sum):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.total(batch["a"], batch["b"])


class ByTuple(Sum):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.total(*pair)


class ByAny(Sum):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.total(*args, **kwargs)


class Nested(Sum):
    def forward(self, first: tuple[Tensor, dict[str, Tensor]], scale: Tensor) -> Tensor:
        return self.total(first[0], first[1]["b"]) * scale


class Optional(Sum):
    def forward(self, a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
        total = self.total(a, b)
        return total if mask is None else total * mask


STRUCTURES: dict[str, tuple[type[Sum], Any]] = {
    "keywords": (ByKeyword, lambda a, b: {"a": a, "b": b}),
    "keywords of arguments": (ByArguments, lambda a, b: {"b": b, "a": a}),
    "any keywords": (ByAny, lambda a, b: {"b": b, "a": a}),
    "a dict": (ByDict, lambda a, b: {"a": a, "b": b}),
    "arguments": (ByArguments, lambda a, b: (a, b)),
    "a list of arguments": (ByArguments, lambda a, b: [a, b]),
    "any arguments": (ByAny, lambda a, b: (a, b)),
    "a tuple": (ByTuple, lambda a, b: (a, b)),
    "a tuple, said so": (ByTuple, lambda a, b: ((a, b),)),
    "fewer than possible": (Optional, lambda a, b: (a, b)),
    "fewer keywords than possible": (Optional, lambda a, b: {"a": a, "b": b}),
    "nested": (Nested, lambda a, b: ((a, {"b": b}), torch.ones(len(a), 1))),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_inputs_of_any_structure(kind: str) -> None:
    module, structure = STRUCTURES[kind]
    a, b, y = (randn(N, k, seed=k).float() for k in (2, 3, 1))
    network = module()
    expected = network.total(a, b)
    x = structure(a, b)
    torch.testing.assert_close(build(network, x, y).outputs(dict(network.named_parameters()), x), expected)
    trained = quick(network, (x, y), pl.MAP(epochs=3, batch_size=5, lr=0.02), likelihood=likelihoods.Gaussian())
    weights = {name: w[0] for name, w in trained.weights().items() if not name.startswith("likelihood.")}
    network.load_state_dict(weights)
    torch.testing.assert_close(trained.functions(structure(a, b))[0], network.total(a, b))
    plain = quick(ByArguments(), ((a, b), y), pl.MAP(epochs=3, batch_size=5, lr=0.02), likelihood=likelihoods.Gaussian())
    for name, w in plain.weights().items():
        torch.testing.assert_close(trained.weights()[name], w)


def test_a_single_input_in_a_tuple_is_an_argument() -> None:
    network, x, y = mlp(), randn(N, 3), randn(N, 1)
    assert torch.equal(build(network, (x,), y).outputs(dict(network.named_parameters()), (x,)), network(x))


class Result(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Structured(nn.Module):
    def __init__(self, wrap: Any):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layer(x))


def test_structured_outputs() -> None:
    x, y = randn(N, 3).float(), torch.arange(N) % 2
    for wrap, output in (
        (lambda f: Result(None, f), lambda o: o.logits),
        (lambda f: {"logits": f}, lambda o: o["logits"]),
        (lambda f: (f, f.sum()), lambda o: o[0]),
        (lambda f: f[:, None], lambda f: f.squeeze(1)),
    ):
        network = Structured(wrap)
        posterior = quick(network, (x, y), output=output)
        assert posterior.functions(x).shape == (1, N, 2)
        expected = quick(network.layer, (x, y)).functions(x)
        torch.testing.assert_close(posterior.functions(x), expected)


@pytest.mark.parametrize(
    ("wrap", "output", "error", "message"),
    [
        (lambda f: Result(None, f), None, TypeError, "network returned Result, .* output=lambda o: o.logits"),
        (lambda f: (f, f), None, TypeError, r"network returned tuple, .* output=lambda o: o\[0\]"),
        (lambda f: {"f": f}, None, TypeError, "network returned dict"),
        (lambda f: None, None, TypeError, "network returned NoneType"),
        (lambda f: (f, f), lambda o: o.logits, TypeError, "output= failed on the tuple .* AttributeError"),
        (lambda f: {"f": f}, lambda o: o["logits"], TypeError, "output= failed on the dict .* KeyError"),
        (lambda f: (f, None), lambda o: o[1], TypeError, "network returned NoneType"),
        (lambda f: f, "logits", TypeError, "output must be a function"),
        (lambda f: f.sum(), None, ValueError, r"12 examples gave outputs of shape \(\)"),
        (lambda f: f.T, None, ValueError, r"12 examples gave outputs of shape \(2, 12\)"),
        (lambda f: f.argmax(1), None, TypeError, "outputs must be floating point, got torch.int64"),
        (lambda f: f.detach(), None, ValueError, "weights do not influence its output"),
        (lambda f: torch.zeros_like(f), None, ValueError, "weights do not influence its output"),
        (lambda f: 0.0 * f, None, ValueError, "weights do not influence its output"),
        (lambda f: nn.functional.threshold(f, 1e9, 0.0), None, ValueError, "weights do not influence its output"),
    ],
)
def test_outputs_that_cannot_be_used_are_refused(wrap: Any, output: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(Structured(wrap), randn(N, 3).float(), torch.arange(N) % 2, output=output)


def test_networks_that_cannot_run_say_why() -> None:
    y = randn(N, 1)
    with pytest.raises(ValueError, match=r"network could not be run on the inputs x \(shape \(12, 2\), torch.float64\)"):
        build(mlp(), randn(N, 2), y)
    with pytest.raises(ValueError, match=r"torch.uint8.*integers and booleans reach it as they are.*x\.float\(\)"):
        build(mlp(), torch.zeros(N, 3, dtype=torch.uint8), y)
    with pytest.raises(ValueError, match=r"\{a: shape \(12, 2\), torch.float32, c: shape"):
        build(ByKeyword(), {"a": randn(N, 2).float(), "c": randn(N, 3).float()}, y.float())
    with pytest.raises(ValueError, match=r"network could not be run.*IndexError"):
        build(nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(2, 1)), torch.full((N, 1), 7), y.float())


def test_weights_that_do_not_influence_the_output_are_named(caplog: pytest.LogCaptureFixture) -> None:
    x, y = randn(N, 3), randn(N, 1)
    with caplog.at_level(logging.WARNING, "plausible"):
        build(mlp(), x, y)
        assert caplog.records == []
        build(Backwards().double(), x, y, output=lambda o: o[0])
    assert [record.getMessage() for record in caplog.records] == [
        "these weights do not influence the output, so data say nothing of them: side.weight, side.bias"
    ]
    with pytest.raises(ValueError, match=r"chooses side\.weight, side\.bias, which do not influence the output"):
        build(Backwards().double(), x, y, output=lambda o: o[0], where="side.*")


def test_units_that_are_dead_at_the_start_count(caplog: pytest.LogCaptureFixture) -> None:
    """A gradient of zero at the given weights says nothing: zero and dead initialisations are looked at around their point."""
    x, y = randn(N, 3), randn(N, 1)
    zero, dead = (nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double() for _ in range(2))
    for parameter in zero.parameters():
        nn.init.zeros_(parameter)
    nn.init.constant_(dead[0].bias, -3.0)
    nn.init.constant_(dead[0].weight, 1e-3)
    with caplog.at_level(logging.WARNING, "plausible"):
        for network in (zero, dead):
            before = torch.random.get_rng_state()
            build(network, x, y)
            assert torch.equal(before, torch.random.get_rng_state())
        build(nn.Linear(3, 1, bias=False).double(), torch.zeros(N, 3, dtype=torch.float64), y)  # the posterior is the prior
    assert caplog.records == []


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze()


def test_a_network_that_loses_the_axis_of_examples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loses the axis of examples; where it ends in squeeze\(\), write squeeze\(-1\)"):
        build(Squeezing().double(), randn(N, 3), randn(N))


class Adapter(nn.Module):
    """A zero-initialised adapter beside a weight that must stay positive definite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.s = (
            nn.Parameter(randn(2, 3)),
            nn.Parameter(torch.zeros(1, 2).double()),
            nn.Parameter(torch.eye(3).double()),
        )

    def forward(self, x: Tensor) -> Tensor:
        root = torch.linalg.cholesky(self.s)
        return torch.linalg.solve(root, x.T).T.sum(1, keepdim=True) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(
    ("network", "x"),
    [
        (Adapter(), lambda: randn(N, 3)),
        (
            nn.Sequential(nn.Embedding(9, 2, padding_idx=0), nn.Flatten(), nn.Linear(4, 1)).double(),
            lambda: torch.zeros(N, 2).long(),
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 1)).double(), lambda: randn(N, 3) * 1e6),
        (nn.Sequential(nn.Linear(3, 1), nn.Hardtanh()).double(), lambda: randn(N, 3) * 1e4),
    ],
    ids=["restricted", "padding", "saturated", "clamped"],
)
def test_weights_that_cannot_be_judged_count_as_moving(network: nn.Module, x: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "plausible"):
        build(network, x(), randn(N, 1))
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------------------------------
# Batch norm, dropout, recurrent and other modules


def test_running_statistics_are_learned_and_used() -> None:
    """After k full-batch steps with momentum 0.1: mean (1 − 0.9ᵏ)m, variance 0.9ᵏ + (1 − 0.9ᵏ)v; prediction uses them."""
    x, y = randn(N, 2).float() * 3 + 5, randn(N, 1).float()
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    k = 7
    posterior = quick(network, (x, y), pl.MAP(epochs=k, batch_size=None, lr=0.01), likelihood=likelihoods.Gaussian())
    stored = {name: v[0] for name, v in posterior.store.get([0], "cpu").items()}
    kept = 0.9**k
    torch.testing.assert_close(stored["0.running_mean"], (1 - kept) * x.mean(0))
    torch.testing.assert_close(stored["0.running_var"], kept + (1 - kept) * x.var(0))
    assert int(stored["0.num_batches_tracked"]) == k
    assert network[0].running_mean.abs().max() == 0  # type: ignore[union-attr]
    z = (x - stored["0.running_mean"]) / (stored["0.running_var"] + 1e-5).sqrt()
    z = z * stored["0.weight"] + stored["0.bias"]
    torch.testing.assert_close(posterior.functions(x)[0], z @ stored["1.weight"].T + stored["1.bias"])
    torch.testing.assert_close(posterior.functions(x[:1])[0], posterior.functions(x)[0, :1])  # no batch statistics
    assert set(posterior.weights()) == {"0.weight", "0.bias", "1.weight", "1.bias", "likelihood.log_scale"}


def test_every_member_has_running_statistics_of_its_own() -> None:
    x, y = randn(N, 2).float() * 3 + 5, randn(N, 1).float()
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    members = pl.Ensemble(pl.MAP(epochs=2, batch_size=5, lr=0.01), members=3)
    posterior = quick(network, (x, y), members, seed=4, likelihood=likelihoods.Gaussian())
    found = posterior.store.get([0, 1, 2], "cpu")["0.running_mean"]
    order = Order(N, 5, 4, members=3)(0, 6)  # three batches an epoch
    expected = torch.zeros(3, 2)
    for rows in order:
        expected = 0.9 * expected + 0.1 * x[rows].mean(1)
    torch.testing.assert_close(found, expected)
    looped = torch.stack(
        [posterior.model.outputs({n: v[k] for n, v in posterior.store.get([0, 1, 2], "cpu").items()}, x) for k in range(3)]
    )
    torch.testing.assert_close(posterior.functions(x), looped)


class Centred(nn.Module):
    """Keeps a running mean by assigning its buffer anew, as user code often does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("constant", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.mean(0)
        return self.layer(x - self.centre) * self.constant


@pytest.mark.parametrize("members", [None, 2])
def test_buffers_that_are_assigned_anew_are_learned(members: int | None) -> None:
    x, y = randn(N, 2).float() + 3, randn(N, 1).float()
    one = pl.MAP(epochs=3, batch_size=None, lr=0.01)
    posterior = quick(Centred(), (x, y), one if members is None else pl.Ensemble(one, members))
    assert list(posterior.model.buffers) == ["centre"]
    for row in range(len(posterior)):
        centre = posterior.store.get([row], "cpu")["centre"][0]
        torch.testing.assert_close(centre, (1 - 0.5**3) * x.mean(0))
    assert float(posterior.model.network.centre.abs().max()) == 0


def test_submodules_in_evaluation_mode_stay_in_it() -> None:
    x, y = randn(N, 3).float() + 2, randn(N, 1).float()
    network = Normed()
    network.norm.eval()
    posterior = quick(network, (x, y), pl.MAP(epochs=3, batch_size=None))
    assert posterior.model.buffers == {}
    assert torch.equal(posterior.model.network.norm.running_mean, torch.zeros(4))
    moved = posterior.model.tempered(2.0).to("cpu")
    moved.outputs(moved.initial, x, train=True)
    assert torch.equal(moved.network.norm.running_mean, torch.zeros(4))  # type: ignore[union-attr]
    assert (network.training, network.norm.training) == (True, False)
    network.eval()  # a module that is in evaluation mode as a whole is trained as usual
    assert "norm.running_mean" in quick(network, (x, y)).model.buffers


def test_one_example_is_enough_to_find_the_buffers() -> None:
    names = ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    images = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 1))
    assert list(build(images, randn(1, 2, 4, 4).float(), randn(1, 1).float()).buffers) == names
    rows = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    assert list(build(rows, randn(1, 2).float(), randn(1, 1).float()).buffers) == names


def test_dropout_is_on_in_training_and_off_in_prediction() -> None:
    x, y = torch.ones(N, 200), torch.zeros(N, 1)
    network = nn.Sequential(nn.Dropout(0.4), nn.Linear(200, 1, bias=False))
    nn.init.ones_(network[1].weight)  # type: ignore[arg-type]
    model = build(network, x, y)
    assert torch.equal(model.outputs(model.initial, x), torch.full((N, 1), 200.0))
    torch.manual_seed(0)
    noisy = model.outputs(model.initial, x, train=True)
    deviation = math.sqrt(200 * 0.4 / 0.6)  # Σ of 200 variables that are 0 or 1/0.6
    assert float((noisy - 200).abs().max()) < 5 * deviation
    assert float(noisy.std()) > deviation / 3
    assert torch.equal(model.outputs(model.initial, x), torch.full((N, 1), 200.0))
    small = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = (randn(N, 3).float(), randn(N, 1).float())
    runs = [quick(small, data, pl.MAP(epochs=4, batch_size=None), seed=seed) for seed in (0, 0, 1)]
    f = [run.functions(data[0]) for run in runs]
    assert torch.equal(f[0], runs[0].functions(data[0], seed=9))
    assert torch.equal(f[0], f[1])
    assert not torch.equal(f[0], f[2])  # full batches: only dropout depends on the seed
    pair = quick(small, data, pl.Ensemble(pl.MAP(epochs=4, batch_size=None), members=2, init="given"))
    assert not torch.equal(*pair.functions(data[0]))  # the members drop different units


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, where it loops by itself
def test_recurrent_networks() -> None:
    x, y = randn(N, 4, 2).float(), randn(N, 1).float()
    one = pl.MAP(epochs=2, batch_size=None, lr=0.01)
    single = quick(Recurrent(), (x, y), one, likelihood=likelihoods.Gaussian())
    both = quick(Recurrent(), (x, y), pl.Ensemble(one, members=2, init="given"), likelihood=likelihoods.Gaussian())
    start = dict(Recurrent().named_parameters())
    for name, weight in both.weights().items():
        torch.testing.assert_close(weight, single.weights()[name].expand_as(weight))
        assert name.startswith("likelihood.") or not torch.equal(weight[0], start[name])
    network = Recurrent()
    network.load_state_dict({n: w[0] for n, w in single.weights().items() if n in start})
    torch.testing.assert_close(single.functions(x)[0], network(x))
    torch.testing.assert_close(both.functions(x)[1], network(x))


class Branching(nn.Module):
    """Looks at a number on its way, which vmap cannot stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.last(hidden if float(hidden.detach().sum()) > 1e6 else torch.tanh(hidden))


def test_networks_that_vmap_cannot_stack_run_in_a_loop_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    x, y = randn(N, 3).float(), randn(N, 1).float()
    method = pl.Ensemble(pl.MAP(epochs=2, batch_size=5, lr=0.01), members=2)
    with caplog.at_level(logging.WARNING, "plausible"):
        looped = quick(Branching(), (x, y), method)
    said = [record.getMessage() for record in caplog.records if "one after the other" in record.getMessage()]
    assert len(said) == 1
    stacked = quick(Normed(), (x, y), method)  # the same function without the branch
    close(looped.store.get([0, 1], "cpu"), stacked.store.get([0, 1], "cpu"))
    torch.testing.assert_close(looped.functions(x), stacked.functions(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transformers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    network = nn.Sequential(nn.Embedding(6, 4), layer, nn.Flatten(), nn.Linear(12, 3))
    words, y = torch.randint(6, (N, 3), generator=stream()), torch.arange(N) % 3
    posterior = quick(network, (words, y), pl.Ensemble(pl.MAP(epochs=2, batch_size=6, lr=0.01), members=2))
    for k in range(2):
        own = copy.deepcopy(network).eval()
        own.load_state_dict({name: w[k] for name, w in posterior.weights().items()})
        torch.testing.assert_close(posterior.functions(words)[k], own(words), atol=1e-5, rtol=1e-4)
    assert chosen(network, "last", words, y) == ["3.weight", "3.bias"]


def test_embeddings_take_integers() -> None:
    words, y = torch.randint(5, (N, 2), generator=stream()), randn(N, 1).float()
    network = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))
    for x in (words, words.numpy(), words.tolist(), words.to(torch.int32)):
        posterior = quick(network, (x, y))
        torch.testing.assert_close(posterior.functions(x), quick(network, (words, y)).functions(words))
    moved = posterior.weights()["0.weight"][0] - network[0].weight.detach()
    assert float(moved.abs().min()) > 0  # unseen words too: the prior moves them


@pytest.mark.parametrize(
    "method", [pl.MAP(epochs=2, batch_size=5), pl.SGLD(epochs=4, lr=1e-4), pl.Ensemble(pl.MAP(epochs=2), 2)]
)
def test_double_precision_stays(method: Any) -> None:
    x, y = randn(N, 3), randn(N, 1)
    posterior = quick(Normed().double(), (x.float().numpy(), y), method)
    assert posterior.model.initial["likelihood.log_scale"].dtype == torch.float64
    for name, value in posterior.store.get([0], "cpu").items():
        assert value.dtype == (torch.int64 if name.endswith("tracked") else torch.float64), name
    assert posterior.functions(x).dtype == torch.float64
    pred = posterior.predict(x)
    assert pred.mean.dtype == torch.float64
    assert pred.log_prob(y).dtype == torch.float64


def test_half_precision_weights_work_too() -> None:
    x, y = randn(N, 3), randn(N, 1)
    posterior = quick(mlp(dtype=torch.bfloat16), (x, y), pl.MAP(epochs=3, batch_size=5))
    assert posterior.functions(x).dtype == torch.bfloat16
    assert bool(torch.isfinite(posterior.functions(x)).all())


def test_mixed_precision_runs_the_forward_pass_in_bfloat16() -> None:
    x, y = randn(N, 3).float(), randn(N, 1).float()
    network = mlp(dtype=torch.float32)
    model = build(network, x, y, precision=torch.bfloat16)
    outputs = model.outputs(model.initial, x)
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.bfloat16().float())
    torch.testing.assert_close(outputs, network(x), atol=0.02, rtol=0.02)
    assert model.gradient(model.initial, Batch(x, y)).grads["0.weight"].dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Modules that cannot be fitted, and the user's module afterwards


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.lock = threading.Lock()


def _not_finite() -> nn.Module:
    network = nn.Linear(3, 1)
    nn.init.constant_(network.bias, math.nan)
    return network


def _frozen() -> nn.Module:
    return nn.Linear(3, 1).requires_grad_(False)


class Reserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.likelihood = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.likelihood(x)


@pytest.mark.parametrize(
    ("network", "error", "message"),
    [
        (lambda: nn.LazyLinear(1), ValueError, r"lazy parameters \(weight, …\): run it once"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 1)), ValueError, "lazy parameters"),
        (lambda: nn.Linear(3, 1, device="meta"), ValueError, r"meta device \(weight, …\).*to_empty"),
        (lambda: nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, affine=False, device="meta")), ValueError, "meta"),
        (lambda: nn.Tanh(), ValueError, "no trainable parameters"),
        (_frozen, ValueError, "no trainable parameters"),
        (_not_finite, ValueError, "network parameter 'bias' contains NaN or infinity"),
        (Reserved, ValueError, "'likelihood.weight'.*rename that submodule"),
        (Locked, ValueError, "cannot be copied"),
        (lambda: nn.Linear(3, 1, dtype=torch.complex64), TypeError, "'weight' is complex, expected real"),
        (lambda: torch.jit.script(nn.Linear(3, 1)), TypeError, "TorchScript"),
        (lambda: nn.Linear, TypeError, "network must be a torch.nn.Module, got type"),
        (lambda: lambda x: x, TypeError, "network must be a torch.nn.Module, got function"),
        (lambda: None, TypeError, "network must be a torch.nn.Module, got NoneType"),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
def test_modules_that_cannot_be_fitted_are_refused(network: Any, error: type[Exception], message: str, device: Any) -> None:
    with pytest.raises(error, match=message):
        quick(network(), (randn(N, 3).float(), randn(N, 1).float()), device=device)


def test_the_users_module_is_left_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    network[0].bias.requires_grad_(False)
    network[1].eval()
    calls: list[str] = []
    network[0].register_forward_hook(lambda *_: None)
    network.register_forward_pre_hook(lambda *_: None)
    network[3].weight.register_hook(lambda grad: calls.append("gradient") or grad)  # type: ignore[func-returns-value]
    state = copy.deepcopy(network.state_dict())
    modes = [m.training for m in network.modules()]
    held = [id(p) for p in (*network.parameters(), *network.buffers())]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in network.modules()]
    x, y = randn(N, 3).float(), randn(N, 1).float()
    for method in (pl.MAP(epochs=2), pl.Ensemble(pl.SGLD(epochs=4, lr=1e-5), members=2)):
        posterior = quick(network, (x, y), method)
        posterior.predict(x).mean  # noqa: B018
    with pytest.raises(ValueError, match="could not be run"):
        quick(network, (x[:, :2], y))
    close(dict(network.state_dict()), state, rtol=0, atol=0)
    assert [m.training for m in network.modules()] == modes
    assert [id(p) for p in (*network.parameters(), *network.buffers())] == held
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in network.modules()] == hooks
    assert all(p.grad is None for p in network.parameters())
    assert [p.requires_grad for p in network.parameters()] == [True, False, True, True, True, True]
    assert calls == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_where_they_are_switched_off(mode: Any) -> None:
    network = mlp()
    expected = quick(network, (randn(N, 3), randn(N, 1))).weights()
    with mode():
        x, y = randn(N, 3), randn(N, 1)  # under inference_mode these are tensors that autograd refuses
        inside = quick(network, (x, y))
    for posterior in (inside, quick(network, (x, y))):
        close(posterior.weights(), expected, rtol=0, atol=0)


def test_later_changes_of_the_module_do_not_reach_the_posterior() -> None:
    x, y = randn(N, 3), randn(N, 1)
    network = mlp()
    posterior = quick(network, (x, y))
    before = posterior.functions(x)
    nn.init.zeros_(network[0].weight)  # type: ignore[arg-type]
    network.train()
    assert torch.equal(posterior.functions(x), before)


# ---------------------------------------------------------------------------------------------------------------------
# Starting points and the prior over functions


def test_prior_functions_follow_the_prior() -> None:
    """f(x) = w·x + b with w, b ~ N(0, s²): f(x) is normal with variance s²(‖x‖² + 1), covariance s²(x·x' + 1)."""
    x = np.array([[0.5, -1.0], [2.0, 0.0], [0.0, 0.0]])
    model = build(nn.Linear(2, 1), torch.tensor(x).float(), torch.zeros(3, 1), likelihoods.Gaussian(1.0), priors.Gaussian(1.5))
    draws = 4000
    f = model.prior_functions(x, draws, seed=3)
    assert f.shape == (draws, 3, 1)
    covariance = 1.5**2 * (x @ x.T + 1)
    for i in range(3):
        check_law(f[:, i, 0].double(), 0.0, covariance[i, i])
    found = np.cov(f[:, :, 0].T.numpy())
    error = np.sqrt((covariance**2 + np.outer(np.diag(covariance), np.diag(covariance))) / draws)
    assert np.all(np.abs(found - covariance) < 5 * error)
    assert torch.equal(f, model.prior_functions(x, draws, seed=3))
    assert not torch.equal(f, model.prior_functions(x, draws, seed=4))
    assert not f.requires_grad
    with pytest.raises(ValueError, match="draws must be at least 1"):
        model.prior_functions(x, 0)
    with pytest.raises(ValueError, match="improper"):
        build(nn.Linear(2, 1), torch.tensor(x).float(), torch.zeros(3, 1), prior=priors.Flat()).prior_functions(x, 2)
    normed = build(Normed(), randn(N, 3).float(), randn(N, 1).float())
    assert normed.prior_functions(randn(2, 3), 5).shape == (5, 2, 1)  # evaluation mode: a single row would do


class Scaled(nn.Module):
    """A layer that resets itself, one whose reset needs an argument, and a bare parameter."""

    class Custom(nn.Linear):
        def reset_parameters(self, scale: float | None = None) -> None:  # called without it by the constructor
            nn.init.normal_(self.weight)
            nn.init.normal_(self.bias)

    class Awkward(nn.Linear):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.weight, self.bias = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(1))

        def reset_parameters(self, scale: float) -> None:  # type: ignore[override]
            raise AssertionError("must not be called")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Custom(3, 4), self.Awkward()
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(3, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.first(x) + self.frozen(x)), self.second.weight, self.second.bias) * self.scale


def test_reinitialised_weights(caplog: pytest.LogCaptureFixture) -> None:
    x, y = randn(N, 3).float(), randn(N, 1).float()
    model = build(Scaled(), x, y)
    state = torch.get_rng_state()
    fresh, again, other = (model.reinitialised(random.generator(0, k)) for k in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert list(fresh) == list(model.initial)
    close(fresh, again, rtol=0, atol=0)
    left = ["scale", "second.weight", "second.bias"]
    assert model.not_reinitialisable() == left
    for name in model.initial:
        kept = name in left or name.startswith("likelihood.")
        assert torch.equal(fresh[name], model.initial[name]) is kept, name
        assert torch.equal(fresh[name], other[name]) is kept, name
    pooled = torch.cat([model.reinitialised(random.generator(1, k))["first.weight"].flatten() for k in range(200)])
    check_law(pooled, 0.0, 1.0)
    with caplog.at_level(logging.WARNING, "plausible"):
        quick(Scaled(), (x, y), pl.Ensemble(pl.MAP(epochs=1), members=2))
    assert any("scale, second.weight, second.bias" in record.getMessage() for record in caplog.records)


def test_starting_at_other_weights() -> None:
    x, y = randn(N, 3).float(), randn(N, 1).float()
    model = build(Normed(), x, y)
    given = {name: w.double() + 1 for name, w in {**model.initial, **model.buffers}.items()}
    started = model.starting_at(given)
    for name, value in {**model.initial, **model.buffers}.items():
        found = {**started.initial, **started.buffers}[name]
        assert found.dtype == value.dtype  # a float32 network stays one
        torch.testing.assert_close(found, value + 1)
    assert started.initial["first.weight"].data_ptr() != given["first.weight"].data_ptr()
    with pytest.raises(ValueError, match=r"'last.bias' has shape \(2,\) .* expected shape \(1,\)"):
        model.starting_at({**given, "last.bias": torch.zeros(2)})
    del given["last.bias"]
    with pytest.raises(ValueError, match=r"'last\.bias' is missing"):
        model.starting_at(given)


def test_models_change_only_what_is_asked_for() -> None:
    x, y = randn(N, 3), randn(N, 1)
    model = build(Normed().double(), x, y, where="last", num_data=50).tempered(2.0)
    fewer = dataclasses.replace(model, num_data=40)
    assert fewer.num_data == 40
    for other in (fewer, model.to("cpu"), model.starting_at({**model.initial, **model.buffers})):
        assert (other.temperature, other.random, other.points) == (2.0, model.random, model.points)
        assert (other.output_shape, other.target_ndim) == ((1,), 2)
        assert torch.equal(other.outputs(other.initial, x), model.outputs(model.initial, x))
    assert model.num_data == 50


def test_a_model_is_built_from_any_data() -> None:
    data = as_data((randn(N, 3), randn(N, 1)), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(mlp(dtype=torch.float32), likelihoods.Gaussian(), priors.Gaussian(), data.all(), num_data=N)
    assert isinstance(quick(model, data), DrawsPosterior)


class _Locked(nn.GRU):
    """Drops out inputs in training mode, as PyTorch's own recurrent layers do not."""

    def forward(self, x, hx=None):
        return super().forward(nn.functional.dropout(x, 0.5, training=self.training), hx)


class _Read(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.layer(x)[0][:, -1])


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 5, batch_first=True),
        nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True),
        _Locked(4, 5, batch_first=True),
    ],
)
def test_recurrent_layers_are_one_function_in_evaluation_mode(layer):
    x = torch.randn(6, 3, 4)
    network = _Read(layer)
    model = Model.build(network, likelihoods.Gaussian(1.0), pl.priors.Gaussian(), Batch(x, torch.randn(6, 1)), num_data=6)
    for _ in range(2):  # before and after a pass in training mode
        forth, back = (model.outputs(model.initial, rows) for rows in (x, x.flip(0)))
        torch.testing.assert_close(forth, back.flip(0))
        torch.testing.assert_close(forth, network.eval()(x))
        model.outputs(model.initial, x, train=True)
    dropped = model.outputs(model.initial, x, train=True)
    assert torch.equal(dropped, model.outputs(model.initial, x, train=True)) == (type(layer) is nn.LSTM and not layer.dropout)
    assert all(not module.training for module in network.modules())


# ---------------------------------------------------------------------------------------------------------------------
# Networks that write to their inputs


class Scaling(nn.Module):
    def __init__(self, when: str):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 1)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "always" or (self.when == "training" and self.training):
            x /= 255
        elif self.when == "never":
            x = x / 255
        return self.layer(x)


@pytest.mark.parametrize(
    "method",
    [
        pl.MAP(epochs=3, batch_size=4),
        pl.Ensemble(pl.MAP(epochs=3, batch_size=None), members=2),
        pl.MeanField(epochs=3),
        pl.Laplace(mode=pl.MAP(epochs=3, batch_size=None)),
        pl.HMC(draws=3, warmup=2, leapfrogs=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_forward_pass_that_writes_to_its_input_changes_nothing(method: pl.Method, tmp_path: Path) -> None:
    x = (255 * torch.rand(12, 3, generator=torch.Generator().manual_seed(0))).numpy()
    data, given = (x, x[:, :1] / 255), x.copy()
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(scale=0.5), "compile": False, "progress": False}
    fitted = pl.fit(Scaling("always"), data, method, **settings)
    plain = pl.fit(Scaling("never"), data, method, **settings)
    for posterior in (fitted, pl.load(fitted.save(tmp_path / "run"), Scaling("always"))):
        assert torch.equal(posterior.functions(x), plain.functions(x))
        assert torch.equal(posterior.predict(x).mean, plain.predict(x).mean)
    assert np.array_equal(x, given)


def test_writing_in_training_alone_is_noticed_too() -> None:
    x = 255 * torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    given = x.clone()
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(scale=0.5), "compile": False, "progress": False}
    method = pl.MAP(epochs=3, batch_size=None)
    fitted, plain = (pl.fit(Scaling(when), (x, x[:, :1] / 255), method, **settings) for when in ("training", "never"))
    assert torch.equal(fitted.weights()["layer.weight"], plain.weights()["layer.weight"])
    assert torch.equal(x, given)
    assert fitted.model.writes == {False: False, True: True}
    assert plain.model.writes == {False: False, True: False}  # no copies any more
