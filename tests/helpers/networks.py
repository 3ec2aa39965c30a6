"""Small networks with every kind of layer, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Bare(nn.Module):
    """A parameter that belongs to no layer, and a layer whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.square = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.square(torch.tanh(self.square(x)) * self.scale))


class Sequence(nn.Module):
    """A recurrent net over vectors, and a head on its last output."""

    def __init__(self, kind: type[nn.RNNBase], **settings: object) -> None:
        super().__init__()
        self.body = kind(3, 4, **settings)
        wide = (settings.get("proj_size") or 4) * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(wide, 2)
        self.first = bool(settings.get("batch_first"))

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.body(x if self.first else x.transpose(0, 1))
        return self.head(found[:, -1] if self.first else found[-1])


class Attention(nn.Module):
    """Attention with a query that is not the key, and a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.places = nn.Embedding(5, 4)
        self.body = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        found, _ = self.body(h[:, :1], h, h, need_weights=False)
        return self.head(found[:, 0])


class Encoder(nn.Module):
    """A transformer layer, examples on the first or on the second axis."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=batch_first)
        self.head = nn.Linear(4, 2)
        self.first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x if self.first else x.transpose(0, 1))
        return self.head(h.mean(1) if self.first else h.mean(0))


class Flattened(nn.Module):
    """Positions and examples on one axis, in both orders."""

    def __init__(self, major: bool) -> None:
        super().__init__()
        self.inner, self.head, self.major = nn.Linear(3, 4), nn.Linear(4, 2), major

    def forward(self, x: Tensor) -> Tensor:
        rows, steps = x.shape[:2]
        if self.major:
            return self.head(torch.tanh(self.inner(x.flatten(0, 1))).view(rows, steps, 4).mean(1))
        flat = x.transpose(0, 1).flatten(0, 1)
        return self.head(torch.tanh(self.inner(flat)).view(steps, rows, 4).mean(0))


def image(*layers: nn.Module) -> nn.Sequential:
    """Convolutions with a head of two outputs."""
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2))


def _batch_norm() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    net[1].running_mean.copy_(torch.randn(4))
    net[1].running_var.copy_(torch.rand(4) + 0.5)
    return net


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "in place": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), (3,)),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), (3, 3)),
    "conv1d": (lambda: image(nn.Conv1d(2, 3, 3, stride=2, padding=1, padding_mode="circular"), nn.Tanh()), (2, 7)),
    "conv2d": (lambda: image(nn.Conv2d(2, 4, 3, padding="same", dilation=2, groups=2), nn.Tanh()), (2, 5, 5)),
    "conv3d": (lambda: image(nn.Conv3d(1, 2, 2, bias=False), nn.Tanh()), (1, 3, 3, 3)),
    "depthwise": (lambda: image(nn.Conv2d(3, 3, 2, groups=3), nn.Tanh()), (3, 3, 3)),
    "transposed 1d": (lambda: image(nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), nn.Tanh()), (2, 3)),
    "transposed 2d": (
        lambda: image(nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh()),
        (4, 2, 2),
    ),
    "transposed 3d": (lambda: image(nn.ConvTranspose3d(1, 2, 2, dilation=2, bias=False), nn.Tanh()), (1, 2, 2, 2)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "group norm": (lambda: image(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh()), (1, 3, 3)),
    "batch norm": (_batch_norm, (3,)),
    "lstm": (lambda: Sequence(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True), (4, 3)),
    "lstm projected": (lambda: Sequence(nn.LSTM, proj_size=2), (4, 3)),
    "gru": (lambda: Sequence(nn.GRU, bidirectional=True), (4, 3)),
    "rnn": (lambda: Sequence(nn.RNN, nonlinearity="relu", bias=False, batch_first=True), (4, 3)),
    "attention": (Attention, ()),
    "transformer": (lambda: Encoder(True), (3, 4)),
    "transformer, examples second": (lambda: Encoder(False), (3, 4)),
    "flattened": (lambda: Flattened(True), (3, 3)),
    "flattened, positions first": (lambda: Flattened(False), (3, 3)),
    "bare": (Bare, (4,)),
    "weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), (3,)),
}


def build(name: str, rows: int = 5, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network in float64 and inputs for it."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    x = torch.randint(0, 7, (rows, 5)) if name == "attention" else torch.randn(rows, *shape).double()
    net = make()
    if any(isinstance(module, nn.LazyLinear) for module in net.modules()):
        net(x.float())
    return net.double().eval(), x
