"""Perceptrons on a CPU: the log joint, its gradient and whole leapfrog paths by machine code made for the network at hand.

`native_density` reads a network off a `ModelDensity`, writes C++ with its sizes as constants (`native_source`), compiles it
once with the system's compiler, and answers as the density it was given did, up to rounding. The code lies in the user's cache
folder, so that later processes load it at once. Where a network, a likelihood or a machine is none for which this works, the
answer is None.

On one core of a 2.8 GHz Xeon a leapfrog over 500 examples of a network 10-50-1 with tanh takes 23 µs in float32 and 55 µs in
float64; a call costs 15 to 27 µs besides, and building the code 1 to 2 s of that core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plausible.blocks.chains.density import Density, Evaluation, ModelDensity, Point
from plausible.blocks.kernels.native_source import BuildError, LinearLayer, load, source
from plausible.core.data import ArrayData
from plausible.core.likelihoods import (
    LOG_DF,
    LOG_SCALE,
    TYPICAL_DF,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    StudentT,
    unscaled,
)
from plausible.core.priors import Gaussian as GaussianPrior
from plausible.core.priors.composed import leaves
from plausible.core.words import log

# weights of a layer from which on PyTorch's matrix products win. On one core of a 2.8 GHz Xeon, in float32, PyTorch's time of a
# gradient over that of this code is 7 to 10 for layers of up to 50 × 50, 3.4 at 100 × 100, 1.9 at 200 × 200, 1.1 at 256 × 256
# and 0.8 at 784 × 400
LARGEST = 2**16


VARYING: dict[type, str] = {HeteroscedasticGaussian: "heteroscedastic", HeteroscedasticStudentT: "heteroscedastic_student"}


class Unsuitable(Exception):
    """Why there is no machine code for this density."""


# ---------------------------------------------------------------------------------------------------------------------
# The density
class _Problem(ctypes.Structure):
    _pointers = tuple((name, ctypes.c_void_p) for name in ("inputs", "targets", "weights", "scales"))
    _fields_ = [("vectors", ctypes.c_long), *_pointers, ("weight", ctypes.c_double), ("lost", ctypes.c_double)]


class _Density(ctypes.Structure):
    _pointers = tuple((name, ctypes.c_void_p) for name in ("beta", "precision"))
    _fields_ = [*_pointers, ("precision_stride", ctypes.c_long), ("scale", ctypes.c_double)]


class _Kernel:
    """The loaded code and the data in its layout; never changed, so that copies of a density share it."""

    def __init__(self, library: ctypes.CDLL, density: ModelDensity):
        pointer, whole, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        self.evaluate, self.leapfrogs, self.trees = library.evaluate, library.leapfrogs, library.trees
        common: list[Any] = [ctypes.POINTER(_Problem), ctypes.POINTER(_Density), whole, number]
        self.evaluate.argtypes = [*common, *[pointer] * 4]
        self.leapfrogs.argtypes = [*common, whole, number, *[pointer] * 5, whole, *[pointer] * 5]
        self.trees.argtypes = [*common, whole, whole, *[pointer] * 7, whole, pointer, whole, *[pointer] * 3]
        batch = density.data.batch  # type: ignore[union-attr]
        layout = (ctypes.c_long * 3)()
        library.layout(layout)
        self.lanes, self.tile, self.stride = layout
        rows = len(batch.y)
        _, y, lost = density.model.likelihood.standardised(batch.y)
        weight = torch.ones(rows) if batch.weight is None else batch.weight
        self.tensors = (  # kept alive: the code has their addresses
            self._tiled(batch.x, density.dtype),
            self._tiled(y.reshape(rows, -1).to(density.dtype), density.dtype),
            self._tiled(weight[:, None], density.dtype),
            torch.tensor(fixed_scales(density), dtype=torch.float64),
        )
        vectors = -(-rows // self.lanes)
        total = float(weight.double().sum())
        self.problem = _Problem(vectors, *(t.data_ptr() for t in self.tensors), total, total * lost)

    def _tiled(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`[n, width]` → `[tiles, width, stride]`, zeros behind the last example."""
        each = self.tile * self.lanes
        tiles = -(-len(rows) // each)
        # vector loads of the code want it to begin at a multiple of 64 bytes, which PyTorch does not promise
        count = tiles * rows.shape[1] * self.stride
        room = torch.zeros(count + 64 // dtype.itemsize, dtype=dtype)
        start = -room.data_ptr() % 64 // dtype.itemsize
        tiled = room[start : start + count].view(tiles, rows.shape[1], self.stride)
        padded = torch.zeros(tiles * each, rows.shape[1], dtype=dtype)
        padded[: len(rows)] = rows
        tiled[:, :, :each] = padded.view(tiles, each, -1).transpose(1, 2)
        return tiled

    def __deepcopy__(self, memo: Any) -> _Kernel:
        return self


class NativeDensity(ModelDensity):
    """A `ModelDensity` whose passes over the data, and leapfrog paths under Gaussian priors, are machine code.

    Made by `native_density`. Chains are divided among `threads` (None: PyTorch's number), and where there are fewer chains than
    threads the examples of each, as far as starting threads is worth the work. Other priors than centred Gaussians are
    differentiated by autograd, a call at a time.
    """

    def __init__(self, density: ModelDensity, library: ctypes.CDLL, threads: int | None = None):
        # the constructor would probe the network again
        vars(self).update(vars(density))
        self.kernel, self.threads = _Kernel(library, density), threads
        self.own = own_precision(density)

    def evaluate(self, position: Tensor) -> Evaluation:
        q = self._ready(position)
        (likelihood, prior), gradient = _numbers(len(q)), torch.empty_like(q)
        density, _kept = self._density(len(q))
        self._call("evaluate", density, len(q), q, gradient, likelihood, prior)
        if density.precision:
            return Evaluation(likelihood, prior, gradient)
        prior, slope = self._prior(q)
        scale = 1.0 / self.model.temperature
        return Evaluation(likelihood, prior * scale, gradient + slope * scale)

    def densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        q = self._ready(position)
        likelihood, prior = _numbers(len(q))
        density, _kept = self._density(len(q))
        self._call("evaluate", density, len(q), q, None, likelihood, prior)
        if not density.precision:
            prior = self._prior(q, gradient=False)[0] / self.model.temperature
        return likelihood, prior

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        """`Density.leapfrogs` in one call, where the prior is Gaussian."""
        chains = len(point.position)
        density, _kept = self._density(chains)
        if not density.precision or count < 1:
            return Density.leapfrogs(self, point, step, inverse_mass, count, keep=keep)
        q, p, g = self._ready(point.position), self._ready(point.momentum), self._ready(point.gradient)
        size = _plain(step, self.dtype, (chains,))
        mass, stride = self._rows(inverse_mass, chains)
        shape = (chains, count) if keep else (chains,)
        moved = [torch.empty((*shape, self.size), dtype=self.dtype) for _ in range(3)]
        # sums in float64 whatever the weights are: energies are compared
        likelihood, prior = _numbers(shape)
        self._call("leapfrogs", density, chains, count, int(keep), q, p, g, size, mass, stride, *moved, likelihood, prior)
        return Point(moved[0], moved[1], likelihood, prior, moved[2])

    def trees(
        self, point: Point, step: Tensor, inverse_mass: Tensor, max_depth: int, uniform: Tensor, length: int
    ) -> tuple[Tensor, ...] | None:
        """What `trees.explore` says, in one call: each chain's tree by one thread; None where the prior is not Gaussian."""
        chains = len(point.position)
        density, _kept = self._density(chains)
        if not density.precision:
            return None
        q, p, g = self._ready(point.position), self._ready(point.momentum), self._ready(point.gradient)
        values = [_plain(part, torch.float64, (chains,)) for part in (point.log_likelihood, point.log_prior)]
        mass, stride = self._rows(inverse_mass, chains)
        levels = _plain(uniform, torch.float64, tuple(uniform.shape))
        to_q, to_gradient = torch.empty_like(q), torch.empty_like(q)
        numbers = torch.empty((chains, 7), dtype=torch.float64)
        size = _plain(step, self.dtype, (chains,))
        start: tuple[Any, ...] = (q, p, g, *values, size, mass, stride)
        ended = (to_q, to_gradient, numbers)
        self._call("trees", density, chains, max_depth, length, *start, levels, uniform.shape[1], *ended)
        return to_q, to_gradient, *numbers.unbind(1)

    # -----------------------------------------------------------------------------------------------------------------
    def _ready(self, values: Tensor) -> Tensor:
        if values.ndim != 2 or values.shape[1] != self.size or values.dtype != self.dtype:
            raise ValueError(
                f"positions, momenta and gradients must be {self.dtype} of shape [chains, {self.size}], got {values.dtype} "
                f"of shape {list(values.shape)}"
            )
        return values if values.is_contiguous() else values.contiguous()

    def _rows(self, values: Tensor, chains: int) -> tuple[Tensor, int]:
        """Numbers for each weight, of all chains `[P]` or of each `[chains, P]`, and the stride between chains."""
        if values.ndim < 2:
            return _plain(values, self.dtype, (self.size,)), 0
        return _plain(values, self.dtype, (chains, self.size)), self.size

    def _density(self, chains: int) -> tuple[_Density, Any]:
        """Powers and precisions as the code takes them, and the tensors that must live as long."""
        beta = None if self.beta is None else _plain(self.beta, torch.float64, (chains,))
        precision, stride = self.own if self.precision is None else self.precision, 0
        if precision is not None:
            precision, stride = self._rows(precision, chains)
        pointers = [None if value is None else value.data_ptr() for value in (beta, precision)]
        return _Density(*pointers, stride, 1.0 / self.model.temperature), (beta, precision)

    def _call(self, name: str, density: _Density, chains: int, *arguments: Tensor | int | None) -> None:
        threads = torch.get_num_threads() if self.threads is None else self.threads
        # the caller holds the tensors: an address does not keep them alive
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        if getattr(self.kernel, name)(self.kernel.problem, density, chains, threads, *plain):
            raise MemoryError(f"no memory for the activations of {chains} chains: run fewer at once")


def _numbers(shape: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.float64)


def _plain(values: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """These numbers of this type, expanded to this shape, side by side in memory."""
    if values.dtype != dtype:
        values = values.detach().to(dtype)
    if values.shape != shape:
        values = values.expand(shape)
    return values if values.is_contiguous() else values.contiguous()


def native_density(density: ModelDensity, threads: int | None = None) -> NativeDensity | None:
    """The same density by machine code, or None where there is none for it (the reason is logged at level DEBUG).

    For `nn.Sequential` networks of `nn.Linear` and elementwise activations, with a Gaussian, categorical or Bernoulli
    likelihood, on data that are resident tensors `[n, inputs]` on the CPU, where all weights are random. The first call for a
    network waits for the compiler, a few seconds; later ones load what it made.
    """
    try:
        if density.device.type != "cpu":
            raise Unsuitable(f"weights are on {density.device}")
        network = perceptron(density)
        if max(layer.inputs * layer.outputs for layer in network.layers) > LARGEST:
            raise Unsuitable(f"a layer of more than {LARGEST:,} weights, for which matrix products are faster")
        program = source(
            *network[:2],
            density.size,
            network.noise,
            double=density.dtype == torch.float64,
            df=network.df,
            freedom=network.freedom,
            least=network.least,
        )
        return NativeDensity(density, load(program), threads)
    except (Unsuitable, BuildError) as reason:
        log.debug("no machine code for this density: %s", reason)
        return None


# ---------------------------------------------------------------------------------------------------------------------
# What the network is
class Perceptron(NamedTuple):
    """Layers, the kind of likelihood, and where a learned log scale and learned degrees of freedom lie in a position.

    `df` are degrees of freedom that are fixed, or what multiplies e^w of the weight at `freedom`; `least` is the smallest scale
    where scales are outputs.
    """

    layers: list[LinearLayer]
    likelihood: str
    noise: int | None
    freedom: int | None = None
    df: float = 1.0
    least: float = 0.0


def perceptron(density: ModelDensity) -> Perceptron:
    """The network of this density, read off its modules; `Unsuitable` where it is another one than a perceptron."""
    model, data = density.model, density.data
    if density.dtype not in (torch.float32, torch.float64):
        raise Unsuitable(f"weights are {density.dtype}")
    if model.points or model.buffers or model.output is not None or model.precision is not None:
        raise Unsuitable("points, buffers, output= or a precision of its count")
    if not isinstance(model.temperature, (int, float)):
        raise Unsuitable("stacked temperatures")
    if not isinstance(data, ArrayData) or not isinstance(data.batch.x, Tensor):
        raise Unsuitable("data are not resident tensors")
    x, y = data.batch.x, data.batch.y
    if data.batch.mask is not None:
        raise Unsuitable("masked targets")
    if x.ndim != 2 or x.dtype != density.dtype or x.device.type != density.device.type or not len(x):
        raise Unsuitable(f"inputs are {x.dtype} of shape {list(x.shape)} on {x.device}")
    offsets, at = {}, 0
    for name, weight in density.like.items():
        offsets[name] = at
        at += weight.numel()
    layers = _layers(model.network, offsets)
    if layers[0].inputs != x.shape[1] or model.output_shape != (layers[-1].outputs,):
        raise Unsuitable("the network changes shapes by other means")
    count = sum(layer.outputs * (layer.inputs + (layer.bias is not None)) for layer in layers)
    likelihood = unscaled(model.likelihood)
    kind, noise = _likelihood(likelihood, layers[-1].outputs, offsets, y)
    count += 0 if noise is None else density.like[LOG_SCALE].numel()
    freedom = offsets.get(LOG_DF)
    count += freedom is not None
    # every weight must have been met, and once
    if count != density.size:
        raise Unsuitable("weights that are tied, frozen or of other modules")
    df = getattr(likelihood, "df", 1.0)
    least = getattr(likelihood, "minimum", 0.0)
    return Perceptron(layers, kind, noise, freedom, TYPICAL_DF if df == "learned" else float(df), least)


def _likelihood(likelihood: Any, outputs: int, offsets: dict[str, int], y: Tensor) -> tuple[str, int | None]:
    # `type … is`: a subclass may have another density
    if type(likelihood) is Categorical and y.ndim == 1:
        return "categorical", None
    if y.ndim == 2 and y.shape[1] == outputs:
        if type(likelihood) is Bernoulli:
            return "bernoulli", None
        if type(likelihood) in (Gaussian, StudentT):
            name = "gaussian" if type(likelihood) is Gaussian else "student"
            if not isinstance(likelihood.scale, str):
                return name, None
            return {"learned": f"{name}_learned", "per-output": f"{name}_per_output"}[likelihood.scale], offsets[LOG_SCALE]
    if y.ndim == 2 and 2 * y.shape[1] == outputs and type(likelihood) in VARYING:
        return VARYING[type(likelihood)], None
    raise Unsuitable(f"{type(likelihood).__name__} with targets of shape {list(y.shape)}")


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    # hooks may change values, which no code read off the modules would know
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise Unsuitable("hooks")
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, child in module._modules.items():
        yield from _modules(child, f"{prefix}{name}.")  # type: ignore[arg-type]


def _layers(network: nn.Module, offsets: dict[str, int]) -> list[LinearLayer]:
    layers: list[LinearLayer] = []
    for name, module in _modules(network):
        if type(module) is nn.Linear:
            weight, bias = (offsets.get(f"{name}{part}") for part in ("weight", "bias"))
            if weight is None or (module.bias is not None and bias is None):
                raise Unsuitable(f"weights of {name.rstrip('.')} are not random")
            layers.append(LinearLayer(module.in_features, module.out_features, weight, bias))
        elif type(module) in (nn.Identity, nn.Dropout) or (
            type(module) is nn.Flatten and module.start_dim in (1, -1) and module.end_dim in (1, -1)
        ):
            continue
        elif type(module) in _ACTIVATIONS and layers and layers[-1].activation == "identity":
            name, first, second = _ACTIVATIONS[type(module)](module)
            layers[-1] = replace(layers[-1], activation=name, settings=(first, second))
        else:
            raise Unsuitable(f"a module of type {type(module).__name__} where none is known")
    if not layers:
        raise Unsuitable("no linear layer")
    return layers


# elementwise activations → their name in the program, and their settings
_ACTIVATIONS: dict[type[nn.Module], Callable[[Any], tuple[str, float, float]]] = {
    nn.Tanh: lambda _: ("tanh", 0.0, 0.0),
    nn.ReLU: lambda _: ("relu", 0.0, 0.0),
    nn.Sigmoid: lambda _: ("sigmoid", 0.0, 0.0),
    nn.SiLU: lambda _: ("silu", 0.0, 0.0),
    nn.Softplus: lambda module: ("softplus", float(module.beta), float(module.threshold)),
    nn.LeakyReLU: lambda module: ("leaky_relu", float(module.negative_slope), 0.0),
    nn.ELU: lambda module: ("elu", float(module.alpha), 0.0),
    nn.GELU: lambda module: ("gelu" if module.approximate == "none" else "gelu_tanh", 0.0, 0.0),
}


def fixed_scales(density: ModelDensity) -> list[float]:
    """σ of each output, where it is fixed (1 where it is learned, or there is none)."""
    scale, outputs = getattr(unscaled(density.model.likelihood), "scale", None), density.model.output_shape[-1]
    if scale is None or isinstance(scale, str):
        return [1.0] * outputs
    return [scale] * outputs if isinstance(scale, float) else list(scale)


def own_precision(density: ModelDensity) -> Tensor | None:
    """The precisions `[P]` of the model's prior, where all of it is centred Gaussian."""
    precisions: dict[str, float] = {}
    for leaf in leaves(density.model.prior, density.model.initial):
        if type(leaf.prior) is not GaussianPrior or leaf.prior.precision is None:
            return None
        precisions |= {name: leaf.prior.precision * factor for name, factor in leaf.factors.items()}
    return torch.cat([weight.new_full((weight.numel(),), precisions[name]) for name, weight in density.like.items()])
