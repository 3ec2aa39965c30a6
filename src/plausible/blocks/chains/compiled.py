"""Leapfrogs as programs: compiled in blocks for the CPU, captured in a CUDA graph on a GPU.

A call of a compiled function costs some 30 µs, as much as a small leapfrog, so `BLOCK` of them go into one graph. On a GPU one
leapfrog is captured, with its buffers, and replayed: nothing crosses the bus along a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from plausible.blocks.chains.density import Evaluation, ModelDensity, Point, gaussian
from plausible.core import weights as tree
from plausible.core.data import ArrayData
from plausible.core.transforms import compiled
from plausible.core.weights import Weights
from plausible.core.words import log

BLOCK = 8
NATIVE_FROM = 2_000  # gradients from which building native code or a kernel pays
COMPILE_FROM = 100_000  # and from which compiling what is captured does


def traced(density: ModelDensity, position: Tensor, beta: Tensor | None, precision: Tensor | None) -> Evaluation:
    """`density.evaluate` in operations that can be compiled: `torch.func` instead of autograd; all data at once."""
    model, batch = density.model, density.data.batch  # type: ignore[union-attr]
    fixed = {name: model.initial[name] for name in model.points}

    def prior_of(weights: Weights) -> Tensor:
        named = {name: value.double() for name, value in {**fixed, **weights}.items()}
        return model.prior.log_prob({name: named[name] for name in model.initial})

    named = density.named(position)
    grads, likelihood = torch.func.vmap(torch.func.grad_and_value(partial(density.log_likelihood_of, batch=batch)))(named)
    # torch.func here, autograd elsewhere: only the first can be traced as a whole
    gradient = tree.flatten(grads, batch_dims=1)
    if precision is not None:
        prior, slope = gaussian(position, precision), -precision * position
    elif density.closed is not None:
        square = (density.closed * position.double().square()).sum(-1)
        prior, slope = density.prior_constant - 0.5 * square, -density.closed.to(density.dtype) * position
    else:
        grads, prior = torch.func.vmap(torch.func.grad_and_value(prior_of))(named)
        slope = tree.flatten(grads, batch_dims=1)
    return density.combined(likelihood, gradient, prior, slope, beta)


def drift_and_kick(
    density: ModelDensity, position: Tensor, momentum: Tensor, size: Tensor, moved: Tensor, beta: Tensor | None, precision: Any
) -> tuple[Tensor, Tensor, Evaluation]:
    """A leapfrog whose momentum is half a step ahead: q ← q + εM⁻¹p, p ← p + ε∇ log π(q)."""
    position = position + moved * momentum
    there = traced(density, position, beta, precision)
    return position, momentum + size * there.gradient, there


class CompiledDensity(ModelDensity):
    """A `ModelDensity` whose leapfrogs run in compiled blocks, always with all rows (missing ones are padded)."""

    programs: dict[Any, Any]
    inner: bool = False  # whether what is captured was compiled before

    @classmethod
    def of(cls, density: ModelDensity) -> Self:
        # everything is known already: the constructor would probe the network again
        made = cls.__new__(cls)
        made.__dict__.update(density.__dict__)
        made.programs = {}
        return made

    def _program(self, count: int, keep: bool, parts: tuple[bool, bool, bool]) -> Any:
        if (count, keep, parts) not in self.programs:

            def block(q: Tensor, p: Tensor, size: Tensor, moved: Tensor, beta: Any, precision: Any) -> Any:
                path = []
                for _ in range(count):
                    q, p, there = drift_and_kick(self, q, p, size, moved, beta, precision)
                    path.append(Point(q, p - 0.5 * size * there.gradient, *there))
                if keep:
                    return q, p, tuple(torch.stack(part, dim=1) for part in zip(*path))
                return q, p, tuple(path[-1])

            self.programs[count, keep, parts] = compiled(block, resident=True)
        return self.programs[count, keep, parts]

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        rows = len(point.position)
        size = self._padded(step.unsqueeze(-1).to(self.dtype), rows)
        moved = size * (self._padded(inverse_mass, rows) if inverse_mass.ndim > 1 else inverse_mass)
        position = self._padded(point.position, rows)
        momentum = self._padded(point.momentum + 0.5 * step.unsqueeze(-1).to(self.dtype) * point.gradient, rows)
        beta = None if self.beta is None else self._padded(self.beta, rows)
        precision = self.precision if self.precision is None or self.precision.ndim == 1 else self._padded(self.precision, rows)
        parts = (beta is not None, precision is not None, keep)
        pieces, left = [], count
        while left:
            # two programs serve every count; a program for each would be compiled each time
            now = BLOCK if left >= BLOCK else 1
            position, momentum, piece = self._program(now, keep, parts)(position, momentum, size, moved, beta, precision)
            pieces.append(piece)
            left -= now
        if not keep:
            return Point(*(value[:rows] for value in pieces[-1]))
        whole = [piece if piece[0].ndim == 3 else tuple(v.unsqueeze(1) for v in piece) for piece in pieces]
        return Point(*(torch.cat(parts, dim=1)[:rows] for parts in zip(*whole)))

    def _padded(self, value: Tensor, rows: int) -> Tensor:
        if rows == self.chains or len(value) != rows:
            return value.contiguous()
        # one shape for all calls: trees drop rows, and another shape is another compilation
        return torch.cat([value, value[:1].expand(self.chains - rows, *value.shape[1:])])


class CapturedDensity(CompiledDensity):
    """A `ModelDensity` on a GPU, one leapfrog of which is captured in a CUDA graph and replayed."""

    def _graph(self, parts: tuple[bool, bool]) -> tuple[Any, dict[str, Tensor]]:
        if parts not in self.programs:
            like = torch.zeros(self.chains, self.size, dtype=self.dtype, device=self.device)
            buffers = {name: like.clone() for name in ("position", "momentum", "moved", "gradient")}
            buffers |= {"size": like[:, :1].clone(), "beta": like[:, 0].clone(), "precision": like.clone() + 1.0}
            for name in ("log_likelihood", "log_prior"):
                buffers[name] = like.new_zeros(self.chains, dtype=torch.float64)

            def body(b: dict[str, Tensor]) -> None:
                beta, precision = b["beta"] if parts[0] else None, b["precision"] if parts[1] else None
                q, p, there = drift_and_kick(self, b["position"], b["momentum"], b["size"], b["moved"], beta, precision)
                for name, value in (("position", q), ("momentum", p), *there._asdict().items()):
                    b[name].copy_(value)

            self.programs[parts] = (self._capture(compiled(body, resident=True) if self.inner else body, buffers), buffers)
        return self.programs[parts]

    def _capture(self, run: Callable[[dict[str, Tensor]], None], buffers: dict[str, Tensor]) -> Any:
        """One call as a CUDA graph, after three on the side that leave nothing to be set up."""
        # CUDA wants warm-ups off the main stream before a capture
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad():
            with torch.cuda.stream(stream):
                # cuBLAS and the allocator set themselves up in the first calls, which cannot be captured
                for _ in range(3):
                    run(buffers)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run(buffers)
        return graph

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        graph, b = self._graph((self.beta is not None, self.precision is not None))
        rows = len(point.position)
        size = step.unsqueeze(-1).to(self.dtype)
        # a graph has fixed addresses: arguments are copied to where it reads them
        b["size"][:rows].copy_(size)
        b["moved"][:rows].copy_(size * inverse_mass)
        b["position"][:rows].copy_(point.position)
        b["momentum"][:rows].copy_(point.momentum + 0.5 * size * point.gradient)
        if self.beta is not None:
            b["beta"][:rows].copy_(self.beta)
        if self.precision is not None:
            b["precision"][:rows].copy_(self.precision.expand(rows, -1))
        path = []
        for _ in range(count):
            graph.replay()
            if keep:
                path.append(self._read(b, rows))
        return Point(*(torch.stack(parts, dim=1) for parts in zip(*path))) if keep else self._read(b, rows)

    @staticmethod
    def _read(b: dict[str, Tensor], rows: int) -> Point:
        momentum = b["momentum"] - 0.5 * b["size"] * b["gradient"]  # back from half a step ahead
        position, *rest = (b[name][:rows].clone() for name in ("position", "log_likelihood", "log_prior", "gradient"))
        return Point(position, momentum[:rows], *rest)


def faster(density: ModelDensity, wish: Any, gradients: int) -> tuple[ModelDensity, str]:
    """The fastest form of a density that pays for about so many gradients, and its name; decided without a clock.

    "native": C++ for perceptrons on a CPU, built in seconds. "fused": a kernel for perceptrons on a GPU. "compiled": by
    inductor, where it is asked for. "captured": a CUDA graph. "eager" otherwise, and where nothing else is possible.
    """
    if wish is False:
        return density, "eager"
    if density.device.type == "cuda" and (wish is True or gradients >= NATIVE_FROM):
        from plausible.blocks.kernels.fused import fused_density

        if (fused := fused_density(density)) is not None and _runs(fused, density):
            return fused, "fused"
    if density.device.type == "cpu" and (wish is True or gradients >= NATIVE_FROM):
        from plausible.blocks.kernels.native import native_density

        if (native := native_density(density)) is not None:
            return native, "native"
    whole = isinstance(density.data, ArrayData) and density.chunk >= density.data.num_data and density.notes["stackable"]
    if not whole or (density.device.type == "cpu" and wish is not True):
        return density, "eager"
    kind = "captured" if density.device.type == "cuda" else "compiled"
    quick = (CapturedDensity if kind == "captured" else CompiledDensity).of(density)
    quick.inner = wish is True or gradients >= COMPILE_FROM
    return (quick, kind) if _runs(quick, density) else (density, "eager")


def _runs(quick: ModelDensity, density: ModelDensity) -> bool:
    """Whether the quick form can be built and run, found out by a leapfrog of length 0; a warning where it cannot."""
    try:
        q = torch.zeros(density.chains, density.size, dtype=density.dtype, device=density.device)
        with torch.no_grad():
            # of no length, so that nothing moves and any failure is that of the build
            at = density.evaluate(q)
            quick.leapfrogs(Point(q, q, *at), torch.zeros(len(q), device=q.device), torch.ones_like(q[0]), 1)
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        log.warning("%s leapfrogs could not be built (%s): others are taken", type(quick).__name__, reason)
        return False
    return True
