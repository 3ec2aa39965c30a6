"""Value and gradient: eager, vmapped, transformed and compiled calls are one function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from plausible.core.optimisers import SGD, AdamW, Optimiser
from plausible.core.transforms import leading, stacked_call, transformed, value_and_gradient, vmapped

MEMBERS = 3


def cubic(w: dict[str, Tensor], x: Tensor, settings: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ (x·a + b)³ · scale, with gradient 3(x·a + b)²·(x, 1)·scale."""
    f = x @ w["a"] + w["b"]
    return (f**3).sum() * settings["scale"], {"f": f.detach()}


def problem() -> tuple[dict[str, Tensor], Tensor]:
    stream = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)  # noqa: E731
    return {"a": draw(MEMBERS, 2), "b": draw(MEMBERS)}, draw(MEMBERS, 5, 2)


def exact(w: dict[str, Tensor], x: Tensor, scale: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    f = torch.einsum("kni,ki->kn", x, w["a"]) + w["b"][:, None]
    slope = 3 * f.square() * scale
    return (f**3).sum(1) * scale, f, {"a": torch.einsum("kn,kni->ki", slope, x), "b": slope.sum(1)}


@pytest.mark.parametrize("way", ["eager", "vmapped", "nested", "inside grad"])
def test_all_ways_give_the_closed_form(way: str) -> None:
    weights, x = problem()
    call = lambda w, part: value_and_gradient(cubic, w, part, {"scale": 0.5})  # noqa: E731
    if way == "eager":
        parts = [call({n: v[k] for n, v in weights.items()}, x[k]) for k in range(MEMBERS)]
        value = torch.stack([p[0] for p in parts])
        f = torch.stack([p[1]["f"] for p in parts])
        grads = {n: torch.stack([p[2][n] for p in parts]) for n in weights}
    elif way == "vmapped":
        value, aux, grads = torch.func.vmap(call)(weights, x)
        f = aux["f"]
    elif way == "nested":
        twice = torch.func.vmap(torch.func.vmap(call))
        value, aux, grads = twice({n: v[None] for n, v in weights.items()}, x[None])
        value, f, grads = value[0], aux["f"][0], {n: g[0] for n, g in grads.items()}
    else:  # the gradient of the value that comes out of a transform, for one member at a time

        def outer(scale: Tensor, w: dict[str, Tensor], part: Tensor) -> tuple[Tensor, Any]:
            value, aux, grads = value_and_gradient(cubic, w, part, {"scale": scale})
            return value, (value, aux["f"], grads)

        scale = torch.tensor(0.5, dtype=torch.float64)
        _, (value, f, grads) = torch.func.vmap(torch.func.grad(outer, has_aux=True), in_dims=(None, 0, 0))(scale, weights, x)
    expected = exact(weights, x, 0.5)
    torch.testing.assert_close((value, f, grads), expected, rtol=1e-12, atol=1e-12)


def test_shared_and_moved_axes() -> None:
    weights, x = problem()
    turned = {"a": weights["a"].T, "b": weights["b"]}
    call = lambda w, part: value_and_gradient(cubic, w, part, {"scale": 1.0})  # noqa: E731
    value, _, grads = torch.func.vmap(call, in_dims=({"a": 1, "b": 0}, None))(turned, x[0])
    expected = exact(weights, x[:1].expand_as(x), 1.0)
    torch.testing.assert_close((value, grads), (expected[0], expected[2]), rtol=1e-12, atol=1e-12)
    one = {"a": weights["a"][0], "b": weights["b"]}  # a weight that all members share has one gradient for each of them
    _, _, grads = torch.func.vmap(call, in_dims=({"a": None, "b": 0}, 0))(one, x)
    expected = exact({"a": one["a"].expand(MEMBERS, 2), "b": one["b"]}, x, 1.0)
    torch.testing.assert_close(grads, expected[2], rtol=1e-12, atol=1e-12)


def test_a_weight_without_influence_has_gradient_zero() -> None:
    f = lambda w: (w["a"].sum() * 2.0, ())  # noqa: E731
    weights = {"a": torch.ones(4, 2), "b": torch.ones(4)}
    _, _, grads = torch.func.vmap(lambda w: value_and_gradient(f, w))(weights)
    torch.testing.assert_close(grads, {"a": torch.full((4, 2), 2.0), "b": torch.zeros(4)})


def test_random_numbers_differ_between_members() -> None:
    f = lambda w: ((w["a"] * torch.randn(())).sum(), ())  # noqa: E731
    with torch.random.fork_rng():
        _, _, grads = torch.func.vmap(lambda w: value_and_gradient(f, w), randomness="different")({"a": torch.ones(4, 1)})
    assert len(set(grads["a"].flatten().tolist())) == 4


def test_detects_where_it_runs() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((transformed(), vmapped()))
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 2))
    torch.func.grad(lambda x: torch.func.vmap(look)(x).sum())(torch.ones(2, 2))
    assert seen == [(False, False), (True, True), (True, False), (True, False), (True, True)]


def test_a_stacked_call_sees_all_members() -> None:
    def rule(info: Any, axes: Any, arguments: Any) -> Tensor:
        (x, shared), (where_x, where_shared) = arguments, axes
        assert (info.batch_size, where_x, where_shared, tuple(x.shape)) == (3, 1, None, (2, 3))
        return leading(x, where_x, 3) * shared

    result = torch.func.vmap(lambda x: stacked_call(rule, x, torch.tensor(2.0)), in_dims=1)(torch.arange(6.0).view(2, 3))
    torch.testing.assert_close(result, 2 * torch.arange(6.0).view(2, 3).T)


@pytest.mark.parametrize("optimiser", [AdamW(), AdamW(weight_decay=0.1), SGD(), SGD(0.9, nesterov=True)], ids=str)
@pytest.mark.parametrize("uneven", [None, "rate", "step"])
def test_stacked_updates_are_those_of_each_member(optimiser: Optimiser, uneven: str | None) -> None:
    """Members in step go through the fused kernel together; others each at their own rate and count."""
    stream = torch.Generator().manual_seed(1)
    weights = {"a": torch.randn(MEMBERS, 4, 2, generator=stream), "b": torch.randn(MEMBERS, 2, generator=stream)}
    rates = torch.tensor([0.1, 0.2, 0.3] if uneven == "rate" else [0.1] * 3)
    single = [{n: w[k].clone() for n, w in weights.items()} for k in range(MEMBERS)]
    states = [optimiser.init(w) for w in single]
    if uneven == "step":
        states = [s._replace(step=s.step + k) for k, s in enumerate(states)]
    together = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    for _ in range(4):
        grads = {n: torch.randn(w.shape, generator=stream) for n, w in weights.items()}
        for k in range(MEMBERS):
            own = {n: g[k] for n, g in grads.items()}
            single[k], states[k] = optimiser.update(single[k], own, states[k], rates[k], 0.01)
        weights, together = torch.func.vmap(lambda w, g, s, r: optimiser.update(w, g, s, r, 0.01))(
            weights, grads, together, rates
        )
    for k in range(MEMBERS):
        torch.testing.assert_close({n: w[k] for n, w in weights.items()}, single[k], rtol=2e-5, atol=1e-6)
        assert float(together.step[k]) == float(states[k].step)


def test_an_uncompiled_stacked_fit_imports_no_compiler() -> None:
    """Importing torch._dynamo takes seconds, and sympy half a second, which the first fit of a process would pay."""
    script = (
        "import sys, torch, plausible as pl; x = torch.randn(20, 2);"
        "pl.fit(torch.nn.Linear(2, 1), (x, x[:, :1]), pl.Ensemble(pl.MAP(epochs=2), members=2), compile=False, progress=False);"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
