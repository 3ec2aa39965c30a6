"""Low-rank adapters: what they compute, what is left to be learned, and that modules which read weights see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.adapters import LoRA, lora, merged


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.value(torch.tanh(self.query(x)))))


@pytest.fixture
def network() -> Block:
    torch.manual_seed(0)
    return Block()


def shaken(module: nn.Module) -> nn.Module:
    """With adapters away from B = 0."""
    stream = torch.Generator().manual_seed(3)
    for name, weight in module.named_parameters():
        if name.endswith((".up", ".down")):
            weight.data = torch.randn(weight.shape, generator=stream)
    return module


def test_a_layer_computes_w_plus_a_scaled_product() -> None:
    torch.manual_seed(0)
    base = nn.Linear(6, 4).double()
    layer = LoRA(base, rank=2, alpha=5.0)
    shaken(nn.Sequential(layer)).double()
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    whole = base.weight + 2.5 * layer.up @ layer.down
    torch.testing.assert_close(layer(x), x @ whole.T + base.bias)
    torch.testing.assert_close(layer.weight, whole)
    assert layer.bias is base.bias
    assert {n for n, w in layer.named_parameters() if w.requires_grad} == {"down", "up"}


def test_an_adapted_network_starts_as_it_was_and_only_adapters_are_learned(network: Block) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    x = torch.randn(9, 6)
    adapted = lora(network, rank=2, where=["query", "val*"], train="head.*")
    torch.testing.assert_close(adapted(x), network(x), rtol=0, atol=0)
    learned = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert learned == ["query.down", "query.up", "value.down", "value.up", "head.weight", "head.bias"]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(weight.requires_grad for weight in network.parameters())
    assert isinstance(network.query, nn.Linear)
    assert all(isinstance(module, LoRA) for module in (lora(network).query, lora(network).head))


def test_a_seed_gives_the_same_adapters_and_leaves_the_generator_alone(network: Block) -> None:
    state = torch.random.get_rng_state()
    first, again, other = lora(network, seed=1), lora(network, seed=1), lora(network, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.query.down, again.query.down)
    assert not torch.equal(first.query.down, other.query.down)
    assert float(first.query.down.detach().abs().max()) <= 6**-0.5


def test_merging_gives_plain_layers_that_compute_the_same(network: Block) -> None:
    adapted = shaken(lora(network, rank=3, alpha=1.0))
    plain = merged(adapted)
    x = torch.randn(9, 6)
    torch.testing.assert_close(plain(x), adapted(x))
    assert [type(module) for module in plain.children()] == [nn.Linear] * 3
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in network.named_parameters()]
    assert not torch.allclose(plain(x), network(x))
    with pytest.raises(ValueError, match="no LoRA layers"):
        merged(network)


def test_modules_that_read_weights_from_outside_see_the_adapters() -> None:
    """The fast path of a transformer layer in evaluation mode never calls its linear layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    adapted = shaken(lora(layer, rank=2)).eval()
    x = torch.randn(3, 4, 8)
    slow = adapted.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(x), slow, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer.eval()(x), slow, atol=1e-2)


def test_a_layer_that_stands_at_two_places_is_adapted_once(network: Block) -> None:
    shared = nn.Linear(5, 5)
    tied = nn.Sequential(shared, nn.Tanh(), shared)
    adapted = lora(tied, rank=1)
    assert adapted[0] is adapted[2]
    assert len([n for n, w in adapted.named_parameters() if w.requires_grad]) == 2
    alone = lora(nn.Linear(3, 2), rank=1)
    assert isinstance(alone, LoRA)
    assert len(list(merged(alone).parameters())) == 2


def test_an_adapted_network_can_be_fitted_and_reinitialised(network: Block) -> None:
    torch.manual_seed(1)
    x = torch.randn(80, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    adapted = lora(network, rank=2)
    ensemble = pl.Ensemble(pl.MAP(epochs=60, lr=0.05, batch_size=20), members=2)
    posterior = pl.fit(adapted, (x, y), ensemble, prior=pl.priors.Gaussian(10.0), compile=False, progress=False)
    first, second = posterior.weights()["query.down"]
    assert not torch.allclose(first, second)
    accuracy = (posterior.predict(x).probs.argmax(-1) == y).double().mean()
    assert float(accuracy) > float((network(x)[:, :2].argmax(-1) == y).double().mean()) + 0.1


def test_laplace_sees_both_sides_of_an_adapter_as_matrices(network: Block) -> None:
    """Kronecker factors for A and B, r × r on one side; the frozen layer has no posterior, and the network's function is kept."""
    torch.manual_seed(2)
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    adapted = shaken(lora(network, rank=2, where=["query", "value"]))
    posterior: Any
    with pytest.warns(UserWarning, match="not at a mode"):  # nothing was trained
        posterior = pl.fit(adapted, (x, y), pl.Laplace(structure="kron", mode=None), compile=False, progress=False)
    shapes = {block.names: tuple(block.values.shape[1:]) for block in posterior.curvature.blocks}
    assert shapes == {("query.down",): (2, 6), ("query.up",): (5, 2), ("value.down",): (2, 5), ("value.up",): (5, 2)}
    assert {block.kind for block in posterior.curvature.blocks} == {"kronecker"}
    mean, covariance = posterior.moments(x)
    torch.testing.assert_close(mean, adapted(x))
    assert bool((covariance.diagonal(dim1=1, dim2=2) > 0).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": 2.0}, "rank must be a whole number"),
        ({"alpha": -1.0}, "alpha must be a positive number"),
        ({"where": "attention"}, "where='attention' matches no linear layer; there are: query, value, head"),
        ({"where": lambda name: False}, "where chooses no linear layer"),
        ({"where": "query", "train": "tail"}, "train='tail' matches no parameter"),
    ],
)
def test_mistakes_are_told(network: Block, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora(network, **arguments)


def test_what_is_no_network_or_pattern_is_refused(network: Block) -> None:
    with pytest.raises(TypeError, match="where must be name patterns"):
        lora(network, where=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"network must be a torch\.nn\.Module"):
        lora("network")  # type: ignore[arg-type]
