"""Networks in plain PyTorch, one for each thing that modules do: what they are called with, hold, share, draw and recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plausible as pl

ROWS = 12


class Subject(NamedTuple):
    """A network with data that fit it, and what `fit` must be told of it."""

    network: nn.Module
    x: Any
    y: Tensor
    likelihood: Any = None
    output: Callable[[Any], Tensor] | None = None


CLASSES = pl.likelihoods.Categorical()
LABELLED = pl.likelihoods.Categorical(ignore_index=-100)


def randn(*shape: int) -> Tensor:
    """The same standard normal numbers at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def integers(high: int, *shape: int) -> Tensor:
    """The same numbers 0 … high − 1 at every call."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def numbers(network: nn.Module, x: Any = None, outputs: int = 1, **more: Any) -> Subject:
    """Three numbers in, `outputs` of them out, unless x says otherwise."""
    return Subject(network, randn(ROWS, 3) if x is None else x, randn(ROWS, outputs), **more)


def classes(network: nn.Module, x: Any, count: int = 3, **more: Any) -> Subject:
    """A class for each row."""
    return Subject(network, x, integers(count, ROWS), CLASSES, **more)


def tokens(network: nn.Module, words: int = 20, length: int = 6, count: int = 3, **more: Any) -> Subject:
    """A class for each text."""
    return classes(network, integers(words, ROWS, length), count, **more)


def per_token(network: nn.Module, words: int = 20, length: int = 6, count: int = 3, **more: Any) -> Subject:
    """A class for each word, of which the last have none."""
    y = integers(count, ROWS, length).index_fill(1, torch.tensor([length - 1]), -100)
    return Subject(network, integers(words, ROWS, length), y, LABELLED, **more)


def images(network: nn.Module, size: int = 8, channels: int = 3, count: int = 3, **more: Any) -> Subject:
    """A class for each picture."""
    return classes(network, randn(ROWS, channels, size, size), count, **more)


class Given(nn.Module):
    """Submodules by name, and the function that calls them."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)
        self.call = call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the function says."""
        return self.call(self, *inputs, **named)


def mlp(
    inputs: int = 3, outputs: int = 1, activation: type[nn.Module] = nn.Tanh, between: tuple[nn.Module, ...] = ()
) -> nn.Sequential:
    """One hidden layer of 6."""
    return nn.Sequential(nn.Linear(inputs, 6), *between, activation(), nn.Linear(6, outputs))


# ---------------------------------------------------------------------------------------------------------------------
# Perceptrons, and what modules hold


def _residual() -> Subject:
    block = lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))  # noqa: E731
    return numbers(Given(lambda m, x: m.c((h := m.a(x)) + m.b(h)), a=nn.Linear(3, 6), b=block(), c=nn.Linear(6, 1)))


def _mixture_of_experts() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return (m.gate(x).softmax(-1)[:, :, None] * torch.stack([expert(x) for expert in m.experts], 1)).sum(1)

    return numbers(Given(call, gate=nn.Linear(3, 3), experts=nn.ModuleList([mlp() for _ in range(3)])))


def _frozen() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = m.body(x)
        return m.head(h)

    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh()).requires_grad_(False)
    return numbers(Given(call, body=body, head=nn.Linear(6, 1)))


def _tied() -> Subject:
    return numbers(Given(lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.T), a=nn.Linear(3, 5)), outputs=3)


class Held(nn.Module):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shift = mlp(), randn(3)

    def forward(self, x: Tensor) -> Tensor:
        """Shifted."""
        return self.net(x - self.shift)


class Bare(nn.Module):
    """Parameters of its own, one of them a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * randn(3, 5))
        self.more = nn.ParameterList([nn.Parameter(0.3 * randn(5, 1)), nn.Parameter(torch.tensor(0.5))])

    def forward(self, x: Tensor) -> Tensor:
        """Two layers."""
        return self.more[1] * (x @ self.weight).tanh() @ self.more[0]


def _writes_input() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        x /= 2.0
        return m.net(x)

    return numbers(Given(call, net=mlp()))


def _hooked() -> Subject:
    network = mlp()
    network[0].register_forward_hook(lambda *seen: 2 * seen[-1])
    return numbers(network)


def _parametrised(kind: Callable[[nn.Module], nn.Module]) -> Callable[[], Subject]:
    return lambda: numbers(nn.Sequential(kind(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 1)))


def _hyper() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        weight = m.makes(x).unflatten(1, (3, 2))
        return m.head(torch.einsum("ni,nio->no", x, weight).tanh())

    return numbers(Given(call, makes=nn.Linear(3, 6), head=nn.Linear(2, 1)))


class Straight(torch.autograd.Function):
    """Rounded forward, the identity backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Rounded."""
        return x.round(decimals=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # noqa: ARG004
        """Straight through."""
        return grad


def _vae() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        mean, spread = m.into(x).chunk(2, -1)
        return m.out(mean + (spread / 2).exp() * torch.randn_like(mean) if m.training else mean)

    return numbers(Given(call, into=nn.Linear(3, 4), out=nn.Linear(2, 3)), outputs=3)


def _noisy_always() -> Subject:
    return numbers(Given(lambda m, x: m.net(x + 0.1 * torch.randn_like(x) * m.training), net=mlp()))


def _checkpointed(reentrant: bool) -> Callable[[], Subject]:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.last(checkpoint(m.block, m.first(x).tanh(), use_reentrant=reentrant))

    def make() -> Subject:
        block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2))
        return numbers(Given(call, first=nn.Linear(3, 5), block=block, last=nn.Linear(5, 1)))

    return make


def _euler() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + 0.2 * m.field(x)
        return m.head(x)

    return numbers(Given(call, field=mlp(3, 3), head=nn.Linear(3, 1)))


def _fixed_point() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        z = torch.zeros_like(m.inject(x))
        for _ in range(6):
            z = (0.5 * m.again(z) + m.inject(x)).tanh()
        return m.head(z)

    return numbers(Given(call, inject=nn.Linear(3, 5), again=nn.Linear(5, 5), head=nn.Linear(5, 1)))


def _several_inputs() -> Subject:
    def call(m: Any, left: Tensor, right: Tensor) -> Tensor:
        return m.join(m.net(left), m.net(right))

    x = {"left": randn(ROWS, 3), "right": randn(ROWS, 3) + 1}
    return numbers(Given(call, net=mlp(outputs=4), join=nn.Bilinear(4, 4, 1)), x)


def _radial_features() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head((-torch.cdist(x, m.centres).square()).exp())

    return numbers(Given(call, centres=randn(5, 3), head=nn.Linear(5, 1)))


def _gaussian_process_like() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.cat([(x @ m.frequencies).cos(), (x @ m.frequencies).sin()], -1))

    return numbers(Given(call, frequencies=nn.Parameter(randn(3, 4)), head=nn.Linear(8, 1)))


def _spectral() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.fft.irfft(torch.fft.rfft(m.lift(x)) * m.filter, n=8))

    return numbers(Given(call, lift=nn.Linear(3, 8), filter=nn.Parameter(randn(5)), head=nn.Linear(8, 1)))


PERCEPTRONS: dict[str, Callable[[], Subject]] = {
    "mlp": lambda: numbers(mlp()),
    "mlp, two outputs": lambda: numbers(mlp(outputs=2), outputs=2),
    "mlp, one column without an axis": lambda: Subject(nn.Sequential(mlp(), nn.Flatten(0)), randn(ROWS, 3), randn(ROWS)),
    "mlp, float64": lambda: Subject(mlp().double(), randn(ROWS, 3).double(), randn(ROWS, 1).double()),
    "mlp, bfloat16": lambda: Subject(mlp().bfloat16(), randn(ROWS, 3).bfloat16(), randn(ROWS, 1)),
    "mlp, classes": lambda: classes(mlp(outputs=3), randn(ROWS, 3)),
    "mlp, binary": lambda: Subject(mlp(), randn(ROWS, 3), integers(2, ROWS, 1).bool()),
    "mlp, labels": lambda: Subject(mlp(outputs=4), randn(ROWS, 3), integers(2, ROWS, 4).bool()),
    "mlp, counts": lambda: Subject(mlp(), randn(ROWS, 3), integers(5, ROWS, 1), pl.likelihoods.Poisson()),
    "mlp, mean and variance": lambda: numbers(mlp(outputs=2), likelihood=pl.likelihoods.HeteroscedasticGaussian()),
    "mlp, Student's t": lambda: numbers(mlp(), likelihood=pl.likelihoods.StudentT()),
    "dropout": lambda: numbers(mlp(between=(nn.Dropout(0.3),))),
    "batch norm": lambda: numbers(mlp(between=(nn.BatchNorm1d(6),))),
    "batch norm without running statistics": lambda: numbers(mlp(between=(nn.BatchNorm1d(6, track_running_stats=False),))),
    "layer norm": lambda: numbers(mlp(between=(nn.LayerNorm(6),))),
    "RMS norm": lambda: numbers(mlp(between=(nn.RMSNorm(6),))),
    "PReLU": lambda: numbers(mlp(activation=nn.PReLU)),
    "ReLU in place": lambda: numbers(nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 1))),
    "gated": lambda: numbers(nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 1))),
    "no bias": lambda: numbers(nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))),
    "residual": _residual,
    "bilinear, two inputs": _several_inputs,
    "mixture of experts": _mixture_of_experts,
    "frozen below": _frozen,
    "tied weights": _tied,
    "tensor as attribute": lambda: numbers(Held()),
    "bare parameters": lambda: numbers(Bare()),
    "writes to its input": _writes_input,
    "forward hook": _hooked,
    "weight norm": _parametrised(nn.utils.parametrizations.weight_norm),
    "spectral norm": _parametrised(nn.utils.parametrizations.spectral_norm),
    "orthogonal": _parametrised(nn.utils.parametrizations.orthogonal),
    "old weight norm": _parametrised(nn.utils.weight_norm),
    "weights from a network": _hyper,
    "function with a backward of its own": lambda: numbers(Given(lambda m, x: m.net(Straight.apply(x)), net=mlp())),
    "VAE": _vae,
    "noise in training": _noisy_always,
    "checkpointed": _checkpointed(False),
    "checkpointed, reentrant": _checkpointed(True),
    "Euler steps": _euler,
    "fixed point": _fixed_point,
    "radial basis": _radial_features,
    "random features": _gaussian_process_like,
    "Fourier layer": _spectral,
    "compiled": lambda: numbers(torch.compile(mlp())),  # type: ignore[arg-type]
    "scripted": lambda: numbers(torch.jit.script(mlp())),
    "output in a dict": lambda: numbers(Given(lambda m, x: {"f": m.net(x)}, net=mlp()), output=lambda o: o["f"]),
    "ensemble inside": lambda: numbers(
        Given(lambda m, x: sum(n(x) for n in m.nets) / 3, nets=nn.ModuleList([mlp() for _ in range(3)]))
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and signals


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Classes first."""
        wide = self.down(x).relu()
        return self.out(torch.cat([wide, self.up(self.deep(wide).relu())], 1))


def _convolutions(*between: nn.Module, inputs: int = 3, **settings: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, 6, 3, padding=1, **settings),
        *between,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def _block() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        h = m.stem(x)
        return m.head((h + m.second(m.first(h).relu())).relu().mean((2, 3)))

    one = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))  # noqa: E731
    return images(Given(call, stem=nn.Conv2d(3, 4, 3), first=one(), second=one(), head=nn.Linear(4, 3)))


def _segmentation() -> Subject:
    y = integers(3, ROWS, 8, 8).index_fill(2, torch.tensor([7]), -100)
    return Subject(UNet(), randn(ROWS, 3, 8, 8), y, LABELLED, lambda logits: logits.movedim(1, -1))


def _channels_last() -> Subject:
    network = _convolutions(nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)
    return classes(network, randn(ROWS, 3, 8, 8).to(memory_format=torch.channels_last))


PICTURES: dict[str, Callable[[], Subject]] = {
    "convolutions": lambda: images(_convolutions()),
    "convolutions, batch norm": lambda: images(_convolutions(nn.BatchNorm2d(6))),
    "convolutions, group norm": lambda: images(_convolutions(nn.GroupNorm(2, 6))),
    "convolutions, instance norm": lambda: images(_convolutions(nn.InstanceNorm2d(6, affine=True, track_running_stats=True))),
    "convolutions in groups": lambda: images(_convolutions(groups=3)),
    "convolutions, dilated": lambda: images(_convolutions(dilation=2)),
    "convolutions, circular": lambda: images(_convolutions(padding_mode="circular")),
    "channels last": _channels_last,
    "residual block": _block,
    "U-Net": _segmentation,
    "autoencoder": lambda: Subject(
        nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.ConvTranspose2d(4, 1, 4, 2, 1)),
        randn(ROWS, 1, 8, 8),
        randn(ROWS, 1, 8, 8),
    ),
    "pixel shuffle": lambda: Subject(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)), randn(ROWS, 1, 4, 4), randn(ROWS, 1, 8, 8)
    ),
    "1-d convolutions": lambda: classes(
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 3)), randn(ROWS, 2, 8)
    ),
    "3-d convolutions": lambda: classes(
        nn.Sequential(nn.Conv3d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)), randn(ROWS, 1, 4, 4, 4)
    ),
    "lazy": lambda: images(nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))),
}


# ---------------------------------------------------------------------------------------------------------------------
# Sequences, words and graphs


def _recurrent(kind: type[nn.RNNBase], **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        layer = kind(3, 4, batch_first=True, **settings)
        width = 4 * (1 + layer.bidirectional)
        return numbers(
            Given(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(width, 1)), randn(ROWS, 5, 3)
        )

    return make


def _transformer(batch_first: bool = True, **settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, **settings)


def _encoder() -> Subject:
    body = nn.TransformerEncoder(_transformer(), 2, enable_nested_tensor=False)
    return tokens(
        Given(lambda m, x: m.head(m.body(m.table(x)).mean(1)), table=nn.Embedding(20, 8), body=body, head=nn.Linear(8, 3))
    )


def _time_first() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(m.table(x).transpose(0, 1)).mean(0))

    return tokens(Given(call, table=nn.Embedding(20, 8), body=_transformer(False), head=nn.Linear(8, 3)))


def _tagger() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.body(m.table(x), src_key_padding_mask=x == 0))

    return per_token(Given(call, table=nn.Embedding(20, 8, padding_idx=0), body=_transformer(), head=nn.Linear(8, 3)))


def _causal() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return F.linear(m.body(m.table(x), mask, is_causal=True), m.table.weight)

    return per_token(Given(call, table=nn.Embedding(20, 8), body=_transformer()), count=20)


def _whole_transformer() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        h = m.table(x)
        return m.head(m.body(h, h).mean(1))

    body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    return tokens(Given(call, table=nn.Embedding(20, 8), body=body, head=nn.Linear(8, 3)))


def _graph() -> Subject:
    def call(m: Any, x: Tensor, adj: Tensor) -> Tensor:
        return m.head((m.own(x) + adj @ m.others(x)).tanh()).squeeze(-1)

    network = Given(call, own=nn.Linear(3, 6), others=nn.Linear(3, 6), head=nn.Linear(6, 1))
    x = {"x": randn(ROWS, 4, 3), "adj": (randn(ROWS, 4, 4) > 0.3).float()}
    return Subject(network, x, randn(ROWS, 4), pl.likelihoods.Gaussian())


def _sets() -> Subject:
    return numbers(Given(lambda m, x: m.after(m.each(x).sum(1)), each=mlp(3, 4), after=mlp(4, 1)), randn(ROWS, 5, 3))


def _flattened_tokens() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        return m.head(m.net(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1))

    return numbers(Given(call, net=mlp(3, 4), head=nn.Linear(4, 1)), randn(ROWS, 5, 3))


def _attention_by_hand() -> Subject:
    def call(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.head(F.scaled_dot_product_attention(q, k, v).mean(1))

    return numbers(Given(call, qkv=nn.Linear(3, 12), head=nn.Linear(4, 1)), randn(ROWS, 5, 3))


def _words(table: nn.Module, **parts: nn.Module) -> Subject:
    return tokens(Given(lambda m, x: m.head(m.table(x).mean(1)), table=table, head=nn.Linear(8, 3), **parts))


SEQUENCES: dict[str, Callable[[], Subject]] = {
    "LSTM": _recurrent(nn.LSTM),
    "LSTM, two layers, both ways": _recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1),
    "LSTM, projected": lambda: numbers(
        Given(
            lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=nn.LSTM(3, 4, batch_first=True, proj_size=2), head=nn.Linear(2, 1)
        ),
        randn(ROWS, 5, 3),
    ),
    "GRU": _recurrent(nn.GRU),
    "RNN": _recurrent(nn.RNN),
    "embeddings": lambda: _words(nn.Embedding(20, 8)),
    "embeddings, sparse": lambda: _words(nn.Embedding(20, 8, sparse=True)),
    "embeddings, clipped": lambda: _words(nn.Embedding(20, 8, max_norm=1.0)),
    "embedding bag": lambda: tokens(nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 3))),
    "transformer encoder": _encoder,
    "transformer, time first": _time_first,
    "transformer, whole": _whole_transformer,
    "tagger with ignored words": _tagger,
    "language model, tied": _causal,
    "attention by hand": _attention_by_hand,
    "positions on the batch's axis": _flattened_tokens,
    "set": _sets,
    "graph": _graph,
}

ALL = {**PERCEPTRONS, **PICTURES, **SEQUENCES}
