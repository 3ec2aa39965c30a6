"""Eager, transformed and list-based updates are the same updates, and they are PyTorch's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from plausible.core.optimisers import SGD, AdamW, Optimiser, as_optimiser
from plausible.core.serialise import decode, encode
from plausible.core.transforms import transformed

STEPS = 7
SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "scale": ()}
OPTIMISERS: list[tuple[Optimiser, Any]] = [
    (AdamW(), lambda w: torch.optim.Adam(w, foreach=False)),
    (
        AdamW(0.8, 0.99, 1e-4, weight_decay=0.1),
        lambda w: torch.optim.AdamW(w, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1, foreach=False),
    ),
    (SGD(), lambda w: torch.optim.SGD(w, momentum=0.9, foreach=False)),
    (SGD(momentum=0.0), lambda w: torch.optim.SGD(w, foreach=False)),
    (
        SGD(0.7, nesterov=True, weight_decay=0.1),
        lambda w: torch.optim.SGD(w, momentum=0.7, nesterov=True, weight_decay=0.1, foreach=False),
    ),
]
IDS = ["adam", "adamw", "sgd", "plain", "nesterov"]
TOLERANCE = {torch.float32: {"rtol": 3e-6, "atol": 3e-7}, torch.float64: {"rtol": 1e-6, "atol": 1e-7}}


def draw(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def rate(step: int) -> Tensor:
    return torch.tensor(0.05 / (1 + step))


def reference(build: Any, dtype: torch.dtype, l2: float) -> dict[str, Tensor]:
    weights = {name: value.requires_grad_() for name, value in draw(0, dtype).items()}
    optimiser = build(list(weights.values()))
    for step in range(STEPS):
        for name, grad in draw(step + 1, dtype).items():
            weights[name].grad = grad + l2 * weights[name].detach()
        optimiser.param_groups[0]["lr"] = rate(step).item()
        optimiser.step()
    return {name: value.detach() for name, value in weights.items()}


def eager(optimiser: Optimiser, dtype: torch.dtype, l2: float, layout: Any = None) -> tuple[dict[str, Tensor], Any]:
    weights = draw(0, dtype)
    if layout is not None:
        weights = {name: layout(value) for name, value in weights.items()}
    state = optimiser.init(weights)
    for step in range(STEPS):
        weights, state = optimiser.update(weights, draw(step + 1, dtype), state, rate(step), l2)
    return weights, state


def columns_first(value: Tensor) -> Tensor:
    return value.t().contiguous().t() if value.ndim == 2 else value


@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
class TestAgainstPyTorch:
    def test_eager(self, optimiser: Optimiser, build: Any, dtype: torch.dtype, l2: float) -> None:
        weights, state = eager(optimiser, dtype, l2)
        torch.testing.assert_close(weights, reference(build, dtype, l2), **TOLERANCE[dtype])
        assert state.step.item() == STEPS

    def test_lists_of_tensors(self, optimiser: Optimiser, build: Any, dtype: torch.dtype, l2: float) -> None:
        weights, _ = eager(optimiser, dtype, l2, layout=columns_first)
        torch.testing.assert_close(weights, reference(build, dtype, l2), **TOLERANCE[dtype])

    def test_vmapped(self, optimiser: Optimiser, build: Any, dtype: torch.dtype, l2: float) -> None:
        expected = reference(build, dtype, l2)
        weights = {name: torch.stack([value, 2 * value]) for name, value in draw(0, dtype).items()}
        state = torch.func.vmap(optimiser.init)(weights)
        for step in range(STEPS):
            grads = {name: torch.stack([value, 3 * value]) for name, value in draw(step + 1, dtype).items()}
            update = torch.func.vmap(lambda w, g, s, r: optimiser.update(w, g, s, r, l2))
            weights, state = update(weights, grads, state, rate(step).expand(2))
        torch.testing.assert_close({name: value[0] for name, value in weights.items()}, expected, **TOLERANCE[dtype])
        assert all(value.dtype == dtype for value in weights.values())
        assert state.step.tolist() == [STEPS, STEPS]


@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_traced(optimiser: Optimiser, build: Any) -> None:
    torch._dynamo.reset()
    step = torch.compile(optimiser.update, fullgraph=True, backend="aot_eager")
    weights = draw(0, torch.float32)
    state = optimiser.init(weights)
    for count in range(STEPS):
        weights, state = step(weights, draw(count + 1, torch.float32), state, rate(count), 0.3)
    torch.testing.assert_close(weights, reference(build, torch.float32, 0.3), **TOLERANCE[torch.float32])


@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_gradients_in_another_layout(optimiser: Optimiser, build: Any) -> None:
    plain, other = draw(0, torch.float32), draw(0, torch.float32)
    grads = draw(1, torch.float32)
    transposed = {name: columns_first(value) for name, value in grads.items()}
    assert not transposed["a.weight"].is_contiguous()
    plain, _ = optimiser.update(plain, grads, optimiser.init(plain), rate(0))
    other, _ = optimiser.update(other, transposed, optimiser.init(other), rate(0))
    torch.testing.assert_close(plain, other, rtol=0, atol=0)


@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_a_slice_of_a_stack_leaves_its_neighbours_alone(optimiser: Optimiser, build: Any) -> None:
    stack = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = stack.clone()
    weights = {"w": stack[:, 1]}
    grads = {"w": torch.ones(4)}
    optimiser.update(weights, grads, optimiser.init(weights), rate(0))
    torch.testing.assert_close(stack[:, ::2], before[:, ::2], rtol=0, atol=0)
    alone = {"w": before[:, 1].clone()}
    optimiser.update(alone, grads, optimiser.init(alone), rate(0))
    torch.testing.assert_close(stack[:, 1], alone["w"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_mixed_precision_weights(optimiser: Optimiser, build: Any) -> None:
    weights = {"single": torch.ones(3), "double": torch.ones(3, dtype=torch.float64)}
    grads = {name: 0.5 * torch.ones_like(value) for name, value in weights.items()}
    weights, _ = optimiser.update(weights, grads, optimiser.init(weights), rate(0))
    assert weights["single"].dtype == torch.float32
    torch.testing.assert_close(weights["single"].double(), weights["double"], rtol=1e-6, atol=1e-7)


def test_leaves_that_require_gradients_are_donated_and_returned() -> None:
    weights = {name: value.requires_grad_() for name, value in draw(0, torch.float32).items()}
    optimiser = AdamW()
    state = optimiser.init(weights)
    assert not any(value.requires_grad for value in state.mean.values())
    new, new_state = optimiser.update(weights, draw(1, torch.float32), state, 0.1)
    assert new is weights
    assert new_state is state
    assert all(value.requires_grad and value.grad_fn is None for value in new.values())


def test_order_of_names_does_not_matter() -> None:
    optimiser = AdamW()
    weights, grads = draw(0, torch.float32), draw(1, torch.float32)
    state = optimiser.init(weights)
    turned = state._replace(mean=dict(reversed(state.mean.items())), square=dict(reversed(state.square.items())))
    other = {name: value.clone() for name, value in weights.items()}
    again = optimiser.init(other)
    optimiser.update(weights, dict(reversed(grads.items())), turned, 0.1)
    optimiser.update(other, grads, again, 0.1)
    torch.testing.assert_close(weights, other, rtol=0, atol=0)


def test_minimises_a_quadratic() -> None:
    target = torch.tensor([1.0, -2.0, 3.0])
    for optimiser, lr in ((AdamW(), 0.05), (SGD(), 0.05)):
        weights = {"w": torch.zeros(3)}
        state = optimiser.init(weights)
        for _ in range(500):
            weights, state = optimiser.update(weights, {"w": weights["w"] - target}, state, lr)
        torch.testing.assert_close(weights["w"], target, rtol=1e-2, atol=1e-2)


def test_detection_of_transforms() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(transformed())
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, True, True, False]
    torch._dynamo.reset()
    traced = torch.compile(lambda x: x + 1 if transformed() else x, fullgraph=True, backend="eager")
    assert traced(torch.zeros(())).item() == 1


@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_stored_as_json(optimiser: Optimiser, build: Any) -> None:
    assert decode(json.loads(json.dumps(encode(optimiser)))) == optimiser


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("own", [AdamW, SGD])
def test_clipping_is_that_of_pytorch_whether_eager_or_stacked(own: Any, dtype: torch.dtype) -> None:
    build = torch.optim.Adam if own is AdamW else (lambda w, lr: torch.optim.SGD(w, lr, momentum=0.9))
    weights = {name: value.requires_grad_() for name, value in draw(0, dtype).items()}
    theirs = build(list(weights.values()), 0.05)
    for step in range(STEPS):
        for name, grad in draw(step + 1, dtype).items():
            weights[name].grad = (10.0**-step) * grad  # the first are too large, the last are not
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.3)
        theirs.step()

    optimiser = own(clip=0.3)
    mine, state = draw(0, dtype), optimiser.init(draw(0, dtype))
    stack = {name: torch.stack([value, 2 * value]) for name, value in draw(0, dtype).items()}
    stacked_state = torch.func.vmap(optimiser.init)(stack)
    for step in range(STEPS):
        grads = {name: (10.0**-step) * grad for name, grad in draw(step + 1, dtype).items()}
        mine, state = optimiser.update(mine, dict(grads), state, 0.05)
        both = {name: torch.stack([grad, 100 * grad]) for name, grad in grads.items()}  # each member has a norm of its own
        stack, stacked_state = torch.func.vmap(lambda w, g, s: optimiser.update(w, g, s, 0.05))(stack, both, stacked_state)
    for name, weight in weights.items():
        torch.testing.assert_close(mine[name], weight.detach(), **TOLERANCE[dtype])
        torch.testing.assert_close(stack[name][0], weight.detach(), **TOLERANCE[dtype])


def test_deep_networks_are_clipped_unless_somebody_says_otherwise() -> None:
    for matrices, limit in ((7, None), (8, 1.0)):
        weights = {f"{i}.weight": torch.zeros(2, 2) for i in range(matrices)} | {f"{i}.bias": torch.zeros(2) for i in range(9)}
        assert AdamW()._limit(weights) == SGD()._limit(weights) == limit
        assert AdamW(clip=None)._limit(weights) is None
        moved, _ = SGD(momentum=0.0).update(
            dict(weights), {n: torch.ones_like(w) for n, w in weights.items()}, SGD(0.0).init(weights), 1.0
        )
        norm = torch.stack([w.norm() for w in moved.values()]).norm()
        assert abs(float(norm) - (1.0 if limit else (4 * matrices + 18) ** 0.5)) < 1e-5
    with pytest.raises(ValueError, match="clip must be"):
        AdamW(clip=0.0)


def test_names_of_optimisers() -> None:
    assert as_optimiser("adam") == AdamW()
    assert as_optimiser("SGD") == SGD()
    assert as_optimiser(SGD(0.5)) == SGD(0.5)
    with pytest.raises(ValueError, match="unknown optimiser 'lion'"):
        as_optimiser("lion")
    with pytest.raises(TypeError, match=r"torch\.optim"):
        as_optimiser(torch.optim.SGD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AdamW(beta1=1.0), "beta1 must be finite and at least 0 and below 1"),
        (lambda: AdamW(beta2=-0.1), "beta2"),
        (lambda: AdamW(eps=0.0), "eps"),
        (lambda: AdamW(weight_decay=-1.0), "weight_decay"),
        (lambda: SGD(momentum=1.0), "momentum"),
        (lambda: SGD(momentum=0.0, nesterov=True), "nesterov"),
        (lambda: AdamW().init({}), "at least one weight"),
    ],
)
def test_bad_settings(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("optimiser", "build"), OPTIMISERS, ids=IDS)
def test_on_the_gpu_without_waiting_for_it(optimiser: Optimiser, build: Any, dtype: torch.dtype) -> None:
    weights = {name: value.cuda() for name, value in draw(0, dtype).items()}
    state = optimiser.init(weights)
    moves = [({name: value.cuda() for name, value in draw(k + 1, dtype).items()}, rate(k).cuda()) for k in range(STEPS)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grads, lr in moves:
            weights, state = optimiser.update(weights, grads, state, lr, 0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = {name: value.cpu() for name, value in weights.items()}
    torch.testing.assert_close(found, reference(build, dtype, 0.3), **TOLERANCE[dtype])
