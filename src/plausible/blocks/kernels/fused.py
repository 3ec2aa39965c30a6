"""Perceptrons on a CUDA GPU: leapfrog trajectories of all chains in one launch of a kernel made for the network at hand.

`fused_density` reads a network off a `ModelDensity`, as `native_density` does for a CPU, writes a Triton kernel with its sizes
as literals (`source`), and answers as the density it was given did, up to rounding: in float32 (products that follow one
another on tensor cores, in three passes of TF32), sums over tiles of examples in float64. Where a network, a prior or a
likelihood is none for which this works, or where there are too few chains to fill the GPU, the answer is None.

Position, momentum and gradient of a chain, one for each program, stay in registers along the trajectory; examples come tile by
tile out of the caches, and activations never leave the chip. Biases are the weights of an input that is always 1. Matrices are
padded to powers of two, of at least 16, and what is padded has weight 0 and mass ∞.
"""

from __future__ import annotations

import functools
import linecache
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Evaluation, ModelDensity, Point, gaussian
from plausible.blocks.kernels.native import Perceptron, Unsuitable, fixed_scales, own_precision, perceptron
from plausible.blocks.kernels.native_source import LinearLayer
from plausible.core.words import log

LARGEST = 8192  # padded weights of a network from which on registers do not hold position, momentum and gradient
WIDEST = 128


class Way(NamedTuple):
    """How a kernel is built: examples of a tile, warps of a program, and the precision of matrix products."""

    rows: int
    warps: int
    precision: str

    @classmethod
    def choose(cls, layers: Sequence[LinearLayer], chains: int) -> Way:
        """Few warps for many chains, which hide each other's waiting; tensor cores where one product follows another."""
        held, widest = elements(layers)
        if len(layers) > 2 or layers[-1].outputs > 1:
            return cls(32 if held > 4096 else 64, 4, "tf32x3")
        return cls(32, 2 if chains > 256 and widest <= 64 else 4, "ieee")


class FusedDensity(ModelDensity):
    """A `ModelDensity` whose trajectories are one kernel launch each. Made by `fused_density`."""

    def __init__(self, density: ModelDensity, network: Perceptron, precision: Tensor | None, way: Way | None = None):
        vars(self).update(vars(density))
        self.way = way or Way.choose(network.layers, density.chains)
        rows = self.way.rows
        text = source(network.layers, network.likelihood, self.size, network.noise, rows=rows, precision=self.way.precision)
        self.kernel, self.own, self.network = compiled(text), precision, network
        batch = self.data.batch  # type: ignore[union-attr]
        first, count = network.layers[0], len(batch.y)
        self.tiles = -(-count // rows)
        weight = torch.ones(count, device=self.device) if batch.weight is None else batch.weight
        self.total = float(weight.double().sum())
        inputs = batch.x.new_zeros(self.tiles * rows, matrices(network.layers)[0].rows)
        inputs[:count, : first.inputs] = batch.x
        # the bias as the weight of one more input
        inputs[:, first.inputs : first.inputs + (first.bias is not None)] = 1.0
        # class numbers too: they are read back as integers
        _, y, self.lost = self.model.likelihood.standardised(batch.y)
        targets = y.reshape(count, -1).float()
        # rows that fill the last tile have weight 0
        behind = self.tiles * rows - count
        self.tensors = (
            inputs,
            torch.cat([targets, targets.new_zeros(behind, targets.shape[1])]).contiguous(),
            torch.cat([weight.float(), weight.new_zeros(behind, dtype=torch.float32)]),
            torch.tensor(fixed_scales(density), device=self.device, dtype=torch.float32),
        )

    def __deepcopy__(self, memo: Any) -> FusedDensity:  # never changed
        return self

    def evaluate(self, position: Tensor) -> Evaluation:
        """A leapfrog of no length; by autograd where the prior is not Gaussian and no precisions are given."""
        if self.own is None and self.precision is None:
            return super().evaluate(position)
        # momenta and sizes of 0: the kernel evaluates where it stands
        still = torch.zeros_like(position)
        end = self._run(position, still, still, position.new_zeros(len(position)), 1, keep=False)
        return Evaluation(end.log_likelihood, end.log_prior, end.gradient)

    def densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.evaluate(position)[:2]

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        if count < 1 or (self.own is None and self.precision is None):
            return Density.leapfrogs(self, point, step, inverse_mass, count, keep=keep)
        size = step.to(self.dtype)
        ahead = point.momentum + 0.5 * size.unsqueeze(-1) * point.gradient
        return self._run(point.position, ahead, size.unsqueeze(-1) * inverse_mass, size, count, keep=keep)

    def _run(self, position: Tensor, ahead: Tensor, moved: Tensor, size: Tensor, count: int, *, keep: bool) -> Point:
        """Trajectories whose momenta are half a step ahead."""
        chains = len(position)
        given: Any = self.own if self.precision is None else self.precision
        precision = given.to(self.dtype).contiguous()
        beta = position.new_ones(chains) if self.beta is None else self.beta.to(self.dtype).expand(chains).contiguous()
        shape, scale = (chains, count) if keep else (chains,), 1.0 / float(self.model.temperature)
        ended = [position.new_empty((*shape, self.size)) for _ in range(3)]
        value = position.new_empty(shape, dtype=torch.float64)
        per_output = self.network.likelihood == "gaussian_per_output"
        total = self.total * (1 if per_output else self.network.layers[-1].outputs)
        with torch.cuda.device_of(position):
            start = (each.contiguous() for each in (position, ahead, moved.expand_as(position), size))
            law = (precision, self.size if precision.ndim > 1 else 0, beta)
            launch = {"KEEP": keep, "num_warps": self.way.warps, "num_stages": 1}
            numbers = (self.tiles, count, scale, total)
            self.kernel[(chains,)](*start, *law, *self.tensors, *numbers, *ended, value, **launch)
        # [chains, 1, P] against paths [chains, steps, P]
        if precision.ndim > 1 and keep:
            precision = precision.unsqueeze(1)
        likelihood = (value + self._constant(ended[0])) * scale
        return Point(ended[0], ended[1], likelihood, gaussian(ended[0], precision) * scale, ended[2])

    def _constant(self, position: Tensor) -> Tensor | float:
        """What the log-likelihood has beside the kernel's sum: −Σ w (log σ + ½ log 2π) for Gaussians."""
        kind, noise, outputs = self.network.likelihood, self.network.noise, self.network.layers[-1].outputs
        if not kind.startswith("gaussian"):
            return 0.0
        constant = -self.total * (outputs * 0.5 * math.log(2 * math.pi) + self.lost)
        if noise is None:
            return constant - self.total * sum(map(math.log, fixed_scales(self)))
        if kind == "gaussian_learned":
            return constant - self.total * outputs * position[..., noise].double()
        return constant - self.total * position[..., noise : noise + outputs].double().sum(-1)


@functools.cache
def compiled(text: str) -> Any:
    """The kernel of a source text, which Triton reads back through `linecache`."""
    # Triton reads the source of a function back from its file, and there is none
    name = f"<plausible kernel {hash(text):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "plausible.sampling.fused_kernel"}
    exec(compile(text, name, "exec"), space)
    return space["kernel"]


def pays(rows: int, held: int, weights: int, chains: int) -> bool:
    """Whether a program for each chain beats matrix products over all chains (compiled and captured).

    On an H200 a leapfrog takes 57 ps for each example and padded weight, in programs of which 264 run at once, against 42 µs
    and 1.4 ps for each example, weight and chain.
    """
    # programs beyond those that run at once wait for their turn
    return 57e-12 * rows * held * max(1.0, chains / 264) < 42e-6 + 1.4e-12 * rows * weights * chains


def fused_density(density: ModelDensity) -> FusedDensity | None:
    """The same density with fused trajectories, or None where there is no kernel for it (the reason is logged at level DEBUG).

    For the networks and likelihoods of `native_density`, in float32, under centred Gaussian priors, up to a few thousand weights.
    """
    try:
        import triton  # noqa: F401

        if density.device.type != "cuda" or density.dtype != torch.float32:
            raise Unsuitable(f"weights are {density.dtype} on {density.device}")
        network = perceptron(density)
        if network.likelihood.startswith(("student", "heteroscedastic")):
            raise Unsuitable(f"likelihood {network.likelihood}")
        if not all(math.isfinite(number) for layer in network.layers for number in layer.settings):
            raise Unsuitable("an activation whose settings are not finite")
        weights, widest = elements(network.layers)
        if weights > LARGEST or widest > WIDEST:
            raise Unsuitable(f"{weights:,} padded weights, layers of up to {widest} units")
        if not pays(len(density.data.batch.y), weights, density.size, density.chains):  # type: ignore[union-attr]
            raise Unsuitable(f"{density.chains} chains leave the GPU idle")
        if (precision := own_precision(density)) is None and density.hierarchy is None:
            raise Unsuitable("the prior is not a centred Gaussian")
        return FusedDensity(density, network, precision)
    except (Unsuitable, ImportError) as reason:
        log.debug("no fused kernel for this density: %s", reason)
        return None


NAMES = (
    "position, momentum, moved, sizes, precision, precision_stride, beta, inputs, targets, weights, scales, tiles, count, "
    "scale, total, to_position, to_momentum, to_gradient, to_value"
)


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


# value `a` and slope, from what came in, `z`
ACTIVATIONS = {
    "tanh": ("e = tl.exp(-2.0 * tl.abs(z)); t = (1.0 - e) / (1.0 + e); a = tl.where(z < 0.0, -t, t)", "1.0 - a * a"),
    "relu": ("a = tl.maximum(z, 0.0)", "tl.where(z > 0.0, 1.0, 0.0)"),
    "sigmoid": ("a = tl.sigmoid(z)", "a * (1.0 - a)"),
    "silu": ("s = tl.sigmoid(z); a = z * s", "s * (1.0 + z * (1.0 - s))"),
    "softplus": (
        "b = FIRST * z; a = tl.where(b > SECOND, z, tl.log(1.0 + tl.exp(tl.minimum(b, SECOND))) / FIRST)",
        "tl.where(b > SECOND, 1.0, tl.sigmoid(b))",
    ),
    "leaky_relu": ("a = tl.where(z > 0.0, z, FIRST * z)", "tl.where(z > 0.0, 1.0, FIRST)"),
    "elu": ("e = FIRST * tl.exp(tl.minimum(z, 0.0)); a = tl.where(z > 0.0, z, e - FIRST)", "tl.where(z > 0.0, 1.0, e)"),
    "gelu": (
        "n = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z)); a = z * n",
        "n + 0.3989422804014327 * z * tl.exp(-0.5 * z * z)",
    ),
    "gelu_tanh": (
        "u = 1.5957691216057308 * (z + 0.044715 * z * z * z); s = tl.sigmoid(u); a = z * s",
        "s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)",
    ),
}


@dataclass(frozen=True)
class _Matrix:
    """A layer as the kernel holds it: `[rows, columns]`, or a vector `[rows]` where there is one output."""

    layer: LinearLayer
    columns: int  # 0: a vector

    @property
    def rows(self) -> int:
        return padded(self.layer.inputs + (self.layer.bias is not None))

    def places(self, n: int) -> list[str]:
        layer, used = self.layer, self.layer.inputs + (self.layer.bias is not None)
        if not self.columns:
            at = (
                f"i{n} + {layer.weight}"
                if layer.bias is None
                else f"tl.where(i{n} < {layer.inputs}, i{n} + {layer.weight}, {layer.bias})"
            )
            return [f"i{n} = tl.arange(0, {self.rows})", f"at{n} = {at}", f"in{n} = i{n} < {used}"]
        at = f"j{n} * {layer.inputs} + i{n} + {layer.weight}"
        if layer.bias is not None:
            at = f"tl.where(i{n} < {layer.inputs}, {at}, j{n} + {layer.bias})"
        return [
            f"i{n} = tl.arange(0, {self.rows})[:, None]",
            f"j{n} = tl.arange(0, {self.columns})[None, :]",
            f"at{n} = {at}",
            f"in{n} = (i{n} < {used}) & (j{n} < {layer.outputs})",
        ]


def matrices(layers: Sequence[LinearLayer]) -> list[_Matrix]:
    """The layers with their padded sizes: what a layer gives is as wide as the next one takes it."""
    held = []
    for layer, after in zip(layers, [*layers[1:], None]):
        # room for the input of 1 that the next layer's bias wants
        width = padded(layer.outputs + (after.bias is not None)) if after is not None else padded(layer.outputs)
        held.append(_Matrix(layer, 0 if after is None and layer.outputs == 1 else width))
    return held


def source(layers: Sequence[LinearLayer], likelihood: str, size: int, noise: int | None, *, rows: int, precision: str) -> str:
    """The kernel for these layers: tiles of so many `rows` of examples, products of this `precision`.

    `noise` is where a learned log scale lies.
    """
    held = matrices(layers)
    names = [str(n) for n in range(len(held))] + (["_noise"] if noise is not None else [])
    start = [line for n, matrix in enumerate(held) for line in matrix.places(n)]
    start += [] if noise is None else _noise_places(noise, likelihood, held[-1])
    drift, clear, kick = [], [], []
    for n in names:
        start += [
            f"q{n} = tl.load(position + base + at{n}, mask=in{n}, other=0.0)",
            f"p{n} = tl.load(momentum + base + at{n}, mask=in{n}, other=0.0)",
            f"g{n} = q{n} * 0.0",
        ]
        drift.append(f"q{n} += tl.load(moved + base + at{n}, mask=in{n}, other=0.0) * p{n}")
        clear.append(f"g{n} = q{n} * 0.0")
        kick += [
            f"prior = tl.load(precision + chain * precision_stride + at{n}, mask=in{n}, other=0.0) * q{n}",
            f"g{n} = tl.where(in{n}, (power * g{n} - prior) * scale, 0.0)",
            f"p{n} += size * g{n}",
        ]
    sums = [f"sums = tl.zeros([{rows}], tl.float64)", *_late(held, rows), *_scales(likelihood, held[-1])]
    end = ["value = tl.sum(sums)", *_late(held, 0), *_noise_gradient(likelihood, noise, held[-1]), *kick]

    def indented(depth: int, lines: Sequence[str]) -> str:
        return textwrap.indent("\n".join(lines), "    " * depth)

    return f"""import triton
import triton.language as tl


@triton.jit
def kernel({NAMES}, KEEP: tl.constexpr):
    chain = tl.program_id(0).to(tl.int64)
    base = chain * {size}
    size = tl.load(sizes + chain)
    power = tl.load(beta + chain)
    row = tl.arange(0, {rows}).to(tl.int64)
{indented(1, start)}
    value = tl.full((), 0.0, tl.float64)
    for step in range(count):
{indented(2, [*drift, *clear, *sums])}
        for tile in range(tiles):
{indented(3, _tile(held, likelihood, rows, precision))}
{indented(2, end)}
        if KEEP:
{indented(3, _stored(names, f"(chain * count + step) * {size}", "chain * count + step"))}
    if not KEEP:
{indented(2, _stored(names, "base", "chain"))}
"""


def _stored(names: Sequence[str], base: str, number: str) -> list[str]:
    lines = [f"behind = {base}"]
    for n in names:
        lines += [
            f"tl.store(to_position + behind + at{n}, q{n}, mask=in{n})",
            f"tl.store(to_momentum + behind + at{n}, p{n} - 0.5 * size * g{n}, mask=in{n})",
            f"tl.store(to_gradient + behind + at{n}, g{n}, mask=in{n})",
        ]
    return [*lines, f"tl.store(to_value + {number}, value)"]


def _noise_places(noise: int, likelihood: str, last: _Matrix) -> list[str]:
    if likelihood == "gaussian_learned" or not last.columns:
        return [f"at_noise = {noise}", "in_noise = chain >= 0"]
    return [
        f"at_noise = tl.arange(0, {last.columns}) + {noise}",
        f"in_noise = tl.arange(0, {last.columns}) < {last.layer.outputs}",
    ]


def _late(held: Sequence[_Matrix], rows: int) -> list[str]:
    """Sums over examples for the weights of a single output: begun for tiles of so many `rows`, or (0) brought to an end."""
    single = [(n, matrix) for n, matrix in enumerate(held) if not matrix.columns]
    if rows:
        return [f"s{n} = tl.zeros([{rows}, {matrix.rows}], tl.float32)" for n, matrix in single]
    return [f"g{n} = tl.sum(s{n}, axis=0)" for n, _ in single]


def _noise_gradient(likelihood: str, noise: int | None, last: _Matrix) -> list[str]:
    """∂/∂log σ = Σ w (z² − 1), where the sum of the log-likelihood is −½ Σ w z²."""
    if noise is None:
        return []
    several = likelihood == "gaussian_per_output" and last.columns
    return ["g_noise = g_noise - total" if several else "g_noise = (-2.0 * value).to(tl.float32) - total"]


def _scales(likelihood: str, last: _Matrix) -> list[str]:
    if likelihood == "gaussian":
        if not last.columns:
            return ["inverse = 1.0 / tl.load(scales)"]
        column = f"tl.arange(0, {last.columns})"
        return [f"inverse = 1.0 / tl.load(scales + {column}, mask={column} < {last.layer.outputs}, other=1.0)"]
    return ["inverse = tl.exp(-q_noise)"] if likelihood.startswith("gaussian") else []


def _tile(held: Sequence[_Matrix], likelihood: str, rows: int, precision: str) -> list[str]:
    """Forward, likelihood and backward over one tile of examples."""
    first, last, end = held[0], held[-1], len(held) - 1
    dots = f'input_precision="{precision}", out_dtype=tl.float32'
    lines = [
        f"here = tile * {rows} + row",
        f"a0 = tl.load(inputs + here[:, None] * {first.rows} + tl.arange(0, {first.rows})[None, :])",
        "w = tl.load(weights + here)",
    ]
    for n, matrix in enumerate(held):
        layer = matrix.layer
        lines.append(f"z = tl.dot(a{n}, q{n}, {dots})" if matrix.columns else f"z = tl.sum(a{n} * q{n}[None, :], axis=1)")
        if layer.activation == "identity":
            lines.append("a = z")
        else:
            value, slope = (
                text.replace("FIRST", repr(layer.settings[0])).replace("SECOND", repr(layer.settings[1]))
                for text in ACTIVATIONS[layer.activation]
            )
            lines += [*value.split("; "), f"slope{n} = {slope}"]
        if n < end and held[n + 1].layer.bias is not None:
            lines.append(f"a = tl.where(j{n} == {layer.outputs}, 1.0, a)")
        lines.append(f"a{n + 1} = a")
    lines += _likelihood(likelihood, last, f"a{end + 1}")
    for n in range(end, -1, -1):
        matrix = held[n]
        if matrix.layer.activation != "identity":
            lines.append(f"delta = delta * slope{n}")
        if matrix.columns:
            lines.append(f"g{n} += tl.dot(tl.trans(a{n}), delta, {dots})")
            back = f"tl.dot(delta, tl.trans(q{n}), {dots})"
        else:
            lines.append(f"s{n} += a{n} * delta[:, None]")
            back = f"delta[:, None] * q{n}[None, :]"
        if n:
            lines.append(f"delta = {back}")
    return lines


def _likelihood(likelihood: str, last: _Matrix, f: str) -> list[str]:
    """Adds the log-likelihood of the tile to `value`, without constants; its gradient in the outputs is `delta`."""
    wide, weight = bool(last.columns), "w[:, None]" if last.columns else "w"
    if likelihood == "categorical":
        column = f"tl.arange(0, {last.columns})[None, :]"
        return [
            "label = tl.load(targets + here).to(tl.int32)",
            f"logits = tl.where({column} < {last.layer.outputs}, {f}, -1e30)",
            "most = tl.max(logits, axis=1)",
            "e = tl.exp(logits - most[:, None])",
            "all = tl.sum(e, axis=1)",
            f"chosen = ({column} == label[:, None]).to(tl.float32)",
            f"each = w * (tl.sum(chosen * {f}, axis=1) - most - tl.log(all))",
            "sums += each.to(tl.float64)",
            "delta = w[:, None] * (chosen - e / all[:, None])",
        ]
    places = f"here[:, None] * {last.layer.outputs} + tl.arange(0, {last.columns})[None, :]" if wide else "here"
    mask = f", mask=tl.arange(0, {last.columns})[None, :] < {last.layer.outputs}, other=0.0" if wide else ""
    lines = [f"y = tl.load(targets + {places}{mask})"]
    if likelihood == "bernoulli":
        soft = f"(tl.maximum({f}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({f}))))"
        used = f" * (tl.arange(0, {last.columns})[None, :] < {last.layer.outputs}).to(tl.float32)" if wide else ""
        lines += [f"each = {weight} * (y * {f} - {soft}){used}", f"delta = {weight} * (y - tl.sigmoid({f})){used}"]
        return [*lines, f"sums += {'tl.sum(each, axis=1)' if wide else 'each'}.to(tl.float64)"]
    inverse = "inverse[None, :]" if wide and likelihood != "gaussian_learned" else "inverse"
    lines += [f"e = (y - {f}) * {inverse}", f"delta = {weight} * e * {inverse}", f"square = {weight} * e * e"]
    if likelihood == "gaussian_per_output" and wide:
        lines.append("g_noise += tl.sum(square, axis=0)")
    return [*lines, f"sums += -0.5 * {'tl.sum(square, axis=1)' if wide else 'square'}.to(tl.float64)"]


def elements(layers: Sequence[LinearLayer]) -> tuple[int, int]:
    """Padded weights, and the widest padded layer: what the kernel must hold on the chip."""
    held = matrices(layers)
    return sum(m.rows * max(m.columns, 1) for m in held), max(max(m.rows, m.columns) for m in held)
