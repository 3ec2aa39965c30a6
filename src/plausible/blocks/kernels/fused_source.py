"""A Triton kernel for a perceptron's leapfrogs: whole trajectories in one launch, a chain for each program.

    h_l = a_l(W_l h_{l−1} + b_l),    δ_{l−1} = (W_lᵀ δ_l) ⊙ a'_{l−1},    ∂W_l = Σ_examples δ_l h_{l−1}ᵀ

Position, momentum and gradient of a chain stay in registers along the trajectory; examples come tile by tile out of the caches,
and activations never leave the chip. Biases are the weights of an input that is always 1. `source` writes Python with all sizes as
literals; matrices are padded to powers of two, of at least 16, and what is padded has weight 0 and mass ∞.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plausible.blocks.kernels.native_source import Layer

NAMES = (
    "position, momentum, moved, sizes, precision, precision_stride, beta, inputs, targets, weights, scales, tiles, count, "
    "scale, total, to_position, to_momentum, to_gradient, to_value"
)


def padded(width: int) -> int:
    """The power of two, of at least 16, that holds so many."""
    return max(16, 1 << (width - 1).bit_length())


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
"""Value `a` and slope, from what came in, `z`."""


@dataclass(frozen=True)
class _Matrix:
    """A layer as the kernel holds it: `[rows, columns]`, or a vector `[rows]` where there is one output."""

    layer: Layer
    columns: int  # 0: a vector

    @property
    def rows(self) -> int:
        return padded(self.layer.inputs + (self.layer.bias is not None))

    def places(self, n: int) -> list[str]:
        """Where each weight lies in a position, and which are there."""
        own, used = self.layer, self.layer.inputs + (self.layer.bias is not None)
        if not self.columns:
            at = (
                f"i{n} + {own.weight}"
                if own.bias is None
                else f"tl.where(i{n} < {own.inputs}, i{n} + {own.weight}, {own.bias})"
            )
            return [f"i{n} = tl.arange(0, {self.rows})", f"at{n} = {at}", f"in{n} = i{n} < {used}"]
        at = f"j{n} * {own.inputs} + i{n} + {own.weight}"
        if own.bias is not None:
            at = f"tl.where(i{n} < {own.inputs}, {at}, j{n} + {own.bias})"
        return [
            f"i{n} = tl.arange(0, {self.rows})[:, None]",
            f"j{n} = tl.arange(0, {self.columns})[None, :]",
            f"at{n} = {at}",
            f"in{n} = (i{n} < {used}) & (j{n} < {own.outputs})",
        ]


def matrices(layers: Sequence[Layer]) -> list[_Matrix]:
    """The layers with their padded sizes: what a layer gives is as wide as the next one takes it."""
    found = []
    for layer, after in zip(layers, [*layers[1:], None]):
        width = padded(layer.outputs + (after.bias is not None)) if after is not None else padded(layer.outputs)
        found.append(_Matrix(layer, 0 if after is None and layer.outputs == 1 else width))
    return found


def source(layers: Sequence[Layer], likelihood: str, size: int, noise: int | None, *, rows: int, precision: str) -> str:
    """The kernel for these layers: tiles of so many `rows` of examples, products of this `precision`.

    `noise` is where a learned log scale lies.
    """
    held = matrices(layers)
    names = [str(n) for n in range(len(held))] + (["_noise"] if noise is not None else [])
    start = [line for n, matrix in enumerate(held) for line in matrix.places(n)]
    if noise is not None:
        start += _noise_places(noise, likelihood, held[-1])
    start += [
        line
        for n in names
        for line in (
            f"q{n} = tl.load(position + base + at{n}, mask=in{n}, other=0.0)",
            f"p{n} = tl.load(momentum + base + at{n}, mask=in{n}, other=0.0)",
            f"g{n} = q{n} * 0.0",
        )
    ]
    drift = [f"q{n} += tl.load(moved + base + at{n}, mask=in{n}, other=0.0) * p{n}" for n in names]
    drift += [f"g{n} = q{n} * 0.0" for n in names]
    kick = [
        line
        for n in names
        for line in (
            f"prior = tl.load(precision + chain * precision_stride + at{n}, mask=in{n}, other=0.0) * q{n}",
            f"g{n} = tl.where(in{n}, (power * g{n} - prior) * scale, 0.0)",
            f"p{n} += size * g{n}",
        )
    ]
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit",
        f"def kernel({NAMES}, KEEP: tl.constexpr):",
        *_indented(
            1,
            [
                "chain = tl.program_id(0).to(tl.int64)",
                f"base = chain * {size}",
                "size = tl.load(sizes + chain)",
                "power = tl.load(beta + chain)",
                f"row = tl.arange(0, {rows}).to(tl.int64)",
                *start,
                "value = tl.full((), 0.0, tl.float64)",
                "for step in range(count):",
            ],
        ),
        *_indented(
            2,
            [
                *drift,
                f"sums = tl.zeros([{rows}], tl.float64)",
                *_late(held, rows),
                *_scales(likelihood, held[-1]),
                "for tile in range(tiles):",
            ],
        ),
        *_indented(3, _tile(held, likelihood, rows, precision)),
        *_indented(
            2, ["value = tl.sum(sums)", *_late(held, 0), *_noise_gradient(likelihood, noise, held[-1]), *kick, "if KEEP:"]
        ),
        *_indented(3, _stored(names, f"(chain * count + step) * {size}", "chain * count + step")),
        *_indented(1, ["if not KEEP:"]),
        *_indented(2, _stored(names, "base", "chain")),
    ]
    return "\n".join(lines) + "\n"


def _indented(depth: int, lines: Sequence[str]) -> list[str]:
    return ["    " * depth + line for line in lines]


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
    found = [(n, matrix) for n, matrix in enumerate(held) if not matrix.columns]
    if rows:
        return [f"s{n} = tl.zeros([{rows}, {matrix.rows}], tl.float32)" for n, matrix in found]
    return [f"g{n} = tl.sum(s{n}, axis=0)" for n, _ in found]


def _noise_gradient(likelihood: str, noise: int | None, last: _Matrix) -> list[str]:
    """∂/∂log σ = Σ w (z² − 1), where the sum of the log-likelihood is −½ Σ w z²."""
    if noise is None:
        return []
    several = likelihood == "gaussian_per_output" and last.columns
    return ["g_noise = g_noise - total" if several else "g_noise = (-2.0 * value).to(tl.float32) - total"]


def _scales(likelihood: str, last: _Matrix) -> list[str]:
    """1/σ, a number or one for each column."""
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
        own = matrix.layer
        lines.append(f"z = tl.dot(a{n}, q{n}, {dots})" if matrix.columns else f"z = tl.sum(a{n} * q{n}[None, :], axis=1)")
        if own.activation == "identity":
            lines.append("a = z")
        else:
            value, slope = (
                text.replace("FIRST", repr(own.settings[0])).replace("SECOND", repr(own.settings[1]))
                for text in ACTIVATIONS[own.activation]
            )
            lines += [*value.split("; "), f"slope{n} = {slope}"]
        if n < end and held[n + 1].layer.bias is not None:
            lines.append(f"a = tl.where(j{n} == {own.outputs}, 1.0, a)")
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


def elements(layers: Sequence[Layer]) -> tuple[int, int]:
    """Padded weights, and the widest padded layer: what the kernel must hold on the chip."""
    held = matrices(layers)
    return sum(m.rows * max(m.columns, 1) for m in held), max(max(m.rows, m.columns) for m in held)


__all__ = ["ACTIVATIONS", "elements", "matrices", "padded", "source"]
