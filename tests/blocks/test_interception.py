"""What an interceptor sees of a network, and that it carries masks of dropout under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plausible.blocks.interception import OPERATIONS, Watch
from tests.helpers.networks import NETWORKS, build

RATE = 0.5


class SharedDropout(Watch):
    """A test double: dropout by one mask for all examples of a batch, a draw of a network and not noise."""

    def __init__(self, key: Tensor):
        super().__init__()
        self.key, self.count = key, 0

    def name(self, value: Any) -> str | None:
        return None

    def dropout(self, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # type: ignore[override]
        self.count += 1
        places = torch.arange(input.shape[-1]) + 100 * self.count + self.key
        return input * (torch.sin(12.9898 * places).abs() > p) / (1 - p)


class Seen(Watch):
    """Which of some tensors were used by which operations."""

    def __init__(self, weights: dict[str, Tensor]):
        super().__init__()
        self.names = {id(weight): name for name, weight in weights.items()}
        self.calls: dict[str, set[str]] = {}

    def name(self, value: Any) -> str | None:
        return self.names.get(id(value))

    def intercept(self, function: Any, args: Any, kwargs: Any, known: bool = False) -> Any:
        for value in [*args, *kwargs.values()]:
            for part in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(part, Tensor) and (name := self.name(part)) is not None and function in OPERATIONS:
                    self.calls.setdefault(name, set()).add(OPERATIONS[function])
        return super().intercept(function, args, kwargs, known)


NET = nn.Sequential(nn.Linear(3, 6), nn.Dropout(RATE), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(RATE), nn.Linear(6, 2))


def loss(weights: dict[str, Tensor], x: Tensor, key: Tensor) -> Tensor:
    with SharedDropout(key):
        return torch.func.functional_call(NET, weights, (x,)).square().sum()


def problem() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    torch.manual_seed(0)
    return {n: torch.randn_like(w) for n, w in NET.named_parameters()}, torch.randn(5, 3), torch.tensor(3)


def test_one_mask_for_all_examples() -> None:
    weights, x, key = problem()
    x = x[:1].expand(5, 3)
    with SharedDropout(key) as seen:
        outputs = torch.func.functional_call(NET, weights, (x,))
    assert seen.count == 2
    torch.testing.assert_close(outputs, outputs[:1].expand(5, 2))
    assert not torch.equal(NET(x)[0], NET(x)[1])  # its own masks differ


def test_masks_under_every_transform() -> None:
    weights, x, key = problem()
    grads, value = torch.func.grad_and_value(loss)(weights, x, key)
    torch.testing.assert_close(value, loss(weights, x, key))
    keys = torch.arange(4)
    stacked = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, None, 0))(weights, x, keys)
    torch.testing.assert_close(stacked[1], torch.stack([loss(weights, x, k) for k in keys]))
    torch.testing.assert_close(stacked[0]["0.weight"][3], grads["0.weight"])
    assert len(stacked[1].unique()) == 4


@pytest.mark.parametrize("stacked", [False, True])
def test_masks_in_one_graph(stacked: bool) -> None:
    weights, x, key = problem()
    run: Any = torch.func.grad_and_value(loss)
    if stacked:
        run, key = torch.func.vmap(run, in_dims=(None, None, 0)), torch.arange(4)
    torch.compiler.reset()
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(weights, x, key)
    expected = run(weights, x, key)
    torch.testing.assert_close(found[1], expected[1])
    for name, slope in expected[0].items():
        torch.testing.assert_close(found[0][name], slope)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_of_every_network_is_seen(name: str) -> None:
    net, x = build(name)
    net.eval()
    weights = {n: w.detach() for n, w in net.named_parameters()}
    kinds = {nn.Linear: "linear", nn.Conv2d: "convolution", nn.ConvTranspose2d: "transposed", nn.Embedding: "embedding"}
    kinds |= {nn.LayerNorm: "norm", nn.GroupNorm: "norm", nn.BatchNorm1d: "norm", nn.MultiheadAttention: "attention"}
    kinds |= {nn.LSTM: "recurrent", nn.GRU: "recurrent"}
    plain = torch.func.functional_call(net, weights, (x,))
    with Seen(weights) as seen:
        outputs = torch.func.functional_call(net, weights, (x,))
    torch.testing.assert_close(outputs, plain)
    for path, module in net.named_modules():
        if type(module) in kinds and "out_proj" not in path:  # attention has the projection in its own call
            for n, _ in module.named_parameters(recurse=False):
                assert kinds[type(module)] in seen.calls.get(f"{path}.{n}".lstrip("."), set()), (path, n)


def test_what_is_not_known_runs_on_values() -> None:
    class Doubled(Watch):
        def name(self, value: Any) -> str | None:
            return "w" if value is weight else None

        def value(self, value: Any) -> Any:
            return 2 * value if value is weight else value

    weight, x = torch.ones(2, 2), torch.ones(3, 2)
    with Doubled():
        assert weight.shape == (2, 2)
        products = F.linear(x, weight), x @ weight, torch.cat([weight, x])
    assert [float(product.max()) for product in products] == [4.0, 4.0, 2.0]
