"""Perceptrons on a CUDA GPU: leapfrog trajectories of all chains in one launch of a kernel made for the network at hand.

`fused_density` reads a network off a `ModelDensity`, as `native_density` does for a CPU, writes a Triton kernel with its sizes as
literals (`fused_source`), and answers as the density it was given did, up to rounding: in float32 (products that follow one another
on tensor cores, in three passes of TF32), sums over tiles of examples in float64. Where a network, a prior or a likelihood is none
for which this works, or where there are too few chains to fill the GPU, the answer is None.
"""

from __future__ import annotations

import functools
import linecache
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Evaluation, ModelDensity, Point, gaussian
from plausible.blocks.kernels import fused_source
from plausible.blocks.kernels.native import Perceptron, Unsuitable, fixed_scales, own_precision, perceptron
from plausible.blocks.kernels.native_source import Layer

log = logging.getLogger("plausible")

LARGEST = 8192
"""Padded weights of a network from which on registers do not hold position, momentum and gradient."""
WIDEST = 128


class Way(NamedTuple):
    """How a kernel is built: examples of a tile, warps of a program, and the precision of matrix products."""

    rows: int
    warps: int
    precision: str

    @classmethod
    def choose(cls, layers: Sequence[Layer], chains: int) -> Way:
        """Few warps for many chains, which hide each other's waiting; tensor cores where one product follows another."""
        held, widest = fused_source.elements(layers)
        if len(layers) > 2 or layers[-1].outputs > 1:
            return cls(32 if held > 4096 else 64, 4, "tf32x3")
        return cls(32, 2 if chains > 256 and widest <= 64 else 4, "ieee")


class FusedDensity(ModelDensity):
    """A `ModelDensity` whose trajectories are one kernel launch each. Made by `fused_density`."""

    def __init__(self, density: ModelDensity, found: Perceptron, precision: Tensor | None, way: Way | None = None):
        vars(self).update(vars(density))
        self.way = way or Way.choose(found.layers, density.chains)
        rows = self.way.rows
        text = fused_source.source(
            found.layers, found.likelihood, self.size, found.noise, rows=rows, precision=self.way.precision
        )
        self.kernel, self.own, self.found = compiled(text), precision, found
        batch = self.data.batch  # type: ignore[union-attr]
        first, count = found.layers[0], len(batch.y)
        self.tiles = -(-count // rows)
        weight = torch.ones(count, device=self.device) if batch.weight is None else batch.weight
        self.total = float(weight.double().sum())
        inputs = batch.x.new_zeros(self.tiles * rows, fused_source.matrices(found.layers)[0].rows)
        inputs[:count, : first.inputs] = batch.x
        inputs[:, first.inputs : first.inputs + (first.bias is not None)] = 1.0
        targets = batch.y.reshape(count, -1).float()
        behind = self.tiles * rows - count
        self.tensors = (
            inputs,
            torch.cat([targets, targets.new_zeros(behind, targets.shape[1])]).contiguous(),
            torch.cat([weight.float(), weight.new_zeros(behind, dtype=torch.float32)]),
            torch.tensor(fixed_scales(density), device=self.device, dtype=torch.float32),
        )

    def __deepcopy__(self, memo: Any) -> FusedDensity:
        return self  # never changed

    def evaluate(self, position: Tensor) -> Evaluation:
        """A leapfrog of no length; by autograd where the prior is not Gaussian and no precisions are given."""
        if self.own is None and self.precision is None:
            return super().evaluate(position)
        still = torch.zeros_like(position)
        found = self._run(position, still, still, position.new_zeros(len(position)), 1, keep=False)
        return Evaluation(found.log_likelihood, found.log_prior, found.gradient)

    def densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        found = self.evaluate(position)
        return found.log_likelihood, found.log_prior

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        """`Density.leapfrogs` in one launch."""
        if count < 1 or (self.own is None and self.precision is None):
            return Density.leapfrogs(self, point, step, inverse_mass, count, keep=keep)
        size = step.to(self.dtype)
        ahead = point.momentum + 0.5 * size.unsqueeze(-1) * point.gradient
        return self._run(point.position, ahead, size.unsqueeze(-1) * inverse_mass, size, count, keep=keep)

    def _run(self, position: Tensor, ahead: Tensor, moved: Tensor, size: Tensor, count: int, *, keep: bool) -> Point:
        """Trajectories whose momenta are half a step ahead."""
        chains = len(position)
        own: Any = self.own if self.precision is None else self.precision
        precision = own.to(self.dtype).contiguous()
        beta = position.new_ones(chains) if self.beta is None else self.beta.to(self.dtype).expand(chains).contiguous()
        shape, scale = (chains, count) if keep else (chains,), 1.0 / float(self.model.temperature)
        ended = [position.new_empty((*shape, self.size)) for _ in range(3)]
        value = position.new_empty(shape, dtype=torch.float64)
        per_output = self.found.likelihood == "gaussian_per_output"
        total = self.total * (1 if per_output else self.found.layers[-1].outputs)
        with torch.cuda.device_of(position):
            self.kernel[(chains,)](
                position.contiguous(),
                ahead.contiguous(),
                moved.expand_as(position).contiguous(),
                size.contiguous(),
                precision,
                self.size if precision.ndim > 1 else 0,
                beta,
                *self.tensors,
                self.tiles,
                count,
                scale,
                total,
                *ended,
                value,
                KEEP=keep,
                num_warps=self.way.warps,
                num_stages=1,
            )
        if precision.ndim > 1 and keep:
            precision = precision.unsqueeze(1)
        likelihood = (value + self._constant(ended[0])) * scale
        return Point(ended[0], ended[1], likelihood, gaussian(ended[0], precision) * scale, ended[2])

    def _constant(self, position: Tensor) -> Tensor | float:
        """What the log-likelihood has beside the kernel's sum: −Σ w (log σ + ½ log 2π) for Gaussians."""
        kind, noise, outputs = self.found.likelihood, self.found.noise, self.found.layers[-1].outputs
        if not kind.startswith("gaussian"):
            return 0.0
        constant = -self.total * outputs * 0.5 * math.log(2 * math.pi)
        if noise is None:
            return constant - self.total * sum(map(math.log, fixed_scales(self)))
        if kind == "gaussian_learned":
            return constant - self.total * outputs * position[..., noise].double()
        return constant - self.total * position[..., noise : noise + outputs].double().sum(-1)


@functools.cache
def compiled(text: str) -> Any:
    """The kernel of a source text, which Triton reads back through `linecache`."""
    name = f"<plausible kernel {hash(text):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "plausible.sampling.fused_kernel"}
    exec(compile(text, name, "exec"), space)
    return space["kernel"]


def pays(rows: int, held: int, weights: int, chains: int) -> bool:
    """Whether a program for each chain beats matrix products over all chains (compiled and captured).

    On an H200 a leapfrog takes 57 ps for each example and padded weight, in programs of which 264 run at once, against 42 µs and
    1.4 ps for each example, weight and chain.
    """
    return 57e-12 * rows * held * max(1.0, chains / 264) < 42e-6 + 1.4e-12 * rows * weights * chains


def fused_density(density: ModelDensity) -> FusedDensity | None:
    """The same density with fused trajectories, or None where there is no kernel for it (the reason is logged at level DEBUG).

    For the networks and likelihoods of `native_density`, in float32, under centred Gaussian priors, up to a few thousand weights.
    """
    try:
        import triton  # noqa: F401

        if density.device.type != "cuda" or density.dtype != torch.float32:
            raise Unsuitable(f"weights are {density.dtype} on {density.device}")
        found = perceptron(density)
        if not all(math.isfinite(number) for layer in found.layers for number in layer.settings):
            raise Unsuitable("an activation whose settings are not finite")
        weights, widest = fused_source.elements(found.layers)
        if weights > LARGEST or widest > WIDEST:
            raise Unsuitable(f"{weights:,} padded weights, layers of up to {widest} units")
        if not pays(len(density.data.batch.y), weights, density.size, density.chains):  # type: ignore[union-attr]
            raise Unsuitable(f"{density.chains} chains leave the GPU idle")
        if (precision := own_precision(density)) is None and density.hierarchy is None:
            raise Unsuitable("the prior is not a centred Gaussian")
        return FusedDensity(density, found, precision)
    except (Unsuitable, ImportError) as reason:
        log.debug("no fused kernel for this density: %s", reason)
        return None


__all__ = ["FusedDensity", "fused_density"]
