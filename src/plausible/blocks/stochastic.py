"""Weights that are distributions: one tensor type, every estimator, any module.

A weight w ~ N(μ, σ²), elementwise, is handed to a network in place of a parameter. With noise ε, ζ ~ N(0, 1) and random signs s:

    weights   w = μ + σ ε                                        one draw of the weights for the whole batch
    local     op(x, w) = op(x, μ) + √op(x², σ²) ζ                one ζ for each output element
    flipout   op(x, w) = op(x, μ) + s_out ∘ op(x ∘ s_in, σ ε)    one ε for all, signs for each example

"Local" is Kingma, Salimans & Welling (2015, "Variational dropout and the local reparameterization trick"), flipout is Wen et al.
(2018, "Flipout: efficient pseudo-independent weight perturbations on mini-batches"). Each gives each output the same mean and
variance; the last two make examples uncorrelated, which lowers the variance of gradients. Both need an `op` that is linear in the
weight: `F.linear`, convolutions and transposed convolutions of 1 to 3 dimensions. `op` has the bias in it, random or not.

`gaussian` gives a tensor that carries μ and σ and answers `__torch_function__`, so that any module runs unchanged, in eager
mode, under `torch.func` and in `torch.compile(fullgraph=True)`. Anywhere but in those operations (embeddings, norms, recurrent
nets, attention, arithmetic) the weight is sampled, once for all its uses. Independent noise for each use would be wrong for a
weight that is used twice, and at the first use nobody knows of the second: `survey` finds out beforehand. Cost of a layer: one
`op` for weights, two for local and flipout, and their noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plausible.blocks.interception import AXES, Interceptor, Watched
from plausible.core import random
from plausible.core.weights import Weights

ESTIMATORS = ("weights", "local", "flipout")
FALLBACK = "weights (fallback)"  # sampled, since it is used otherwise than once by a linear operation


class Noise:
    """The noise of one forward pass: on the CPU a pure function of (key, counter, weight name, purpose).

    `key` is int64 [2], `counter` usually the number of the step: see `core.random`. Under `torch.func.vmap` map the key or the
    counter. Make a new one for each forward pass: within one, all uses of a sampled weight see one draw. `drawn` has the values
    of the weights that were sampled, by name; `record` (or the dictionary given for it) how the noise of each was drawn:
    "weights", "local", "flipout" or `FALLBACK`. `antithetic=True` keeps the normal noise, so that `mirrored` can give the same
    pass with −ε and −ζ.
    """

    def __init__(self, key: Tensor, counter: Tensor | int, *, antithetic: bool = False, record: dict[str, str] | None = None):
        if tuple(key.shape) != (2,):
            raise ValueError(
                f"key: got shape {tuple(key.shape)}, expected [2]: one key; for stacked members map the keys with torch.func.vmap"
            )
        self.key, self.counter, self.antithetic = key, counter, antithetic
        self.record: dict[str, str] = {} if record is None else record
        self.drawn: Weights = {}
        self._kept: dict[Any, dict[str, Tensor]] = {}
        self._sign = 1
        self._names: set[str] = set()  # weights that were made
        self._spent: set[str] = set()  # weights whose noise went into the outputs of a linear operation

    @classmethod
    def several(
        cls, key: Tensor, counter: Tensor | int, samples: int, *, antithetic: bool = False, record: dict[str, str] | None = None
    ) -> list[Noise]:
        """The noise of `samples` passes, sample i with the key folded with i (and 0 left as it is).

        With `antithetic`, sample ⌈S/2⌉ + i mirrors sample i, i < ⌊S/2⌋; of an odd number one is without a partner.
        """
        if samples < 1:
            raise ValueError(f"samples: got {samples}, expected at least 1")
        # of an odd number the middle one has no partner
        first = samples - samples // 2 if antithetic else samples
        keys = [random.fold(key, i) if i and key.device.type == "cpu" else key for i in range(first)]
        noises = [cls(each, counter, antithetic=antithetic, record=record) for each in keys]
        return noises + [noise.mirrored() for noise in noises[: samples - first]]

    def mirrored(self) -> Noise:
        """The antithetic partner: −ε and −ζ where this pass has ε and ζ, and the same random signs.

        Both share their noise in memory, so that it also holds where PyTorch's generator draws it, on a GPU.
        """
        if not self.antithetic:
            raise ValueError("mirrored: this noise is not kept; make it with Noise(key, counter, antithetic=True)")
        partner = Noise(self.key, self.counter, antithetic=True, record=self.record)
        partner._kept, partner._sign = self._kept, -self._sign
        return partner

    def normal(self, name: str, like: Tensor) -> Tensor:
        """N(0, 1) of the shape, type and device of `like`, for the purpose `name`."""
        return self._kept_or_drawn(name, lambda: {name: random.normal(self._key(name), self.counter, like)})[name]

    def normals(self, like: Mapping[str, Tensor]) -> Weights:
        """N(0, 1) for all of `like` in one draw of the key itself: it depends on which names are drawn together."""
        return self._kept_or_drawn(tuple(like), lambda: random.normal(self.key, self.counter, like))

    def uniform(self, name: str, like: Tensor) -> Tensor:
        """U(0, 1) of the shape, type and device of `like`, for the purpose `name`; of an antithetic pair the second has 1 − u."""
        drawn = self._kept_or_drawn(name, lambda: {name: random.uniform(self._key(name), self.counter, like)}, sign=1)[name]
        return drawn if self._sign == 1 else 1 - drawn

    def signs(self, name: str, shape: list[int], like: Tensor) -> Tensor:
        """±1 with probability ½ each, of type and device of `like`; the same in both of an antithetic pair."""

        def draw() -> Weights:
            uniform = random.uniform(self._key(name), self.counter, like.new_empty(shape))
            return {name: 1 - 2 * (uniform < 0.5).to(like.dtype)}

        return self._kept_or_drawn(name, draw, sign=1)[name]

    def _kept_or_drawn(self, purpose: Any, draw: Callable[[], Weights], sign: int | None = None) -> Weights:
        # an antithetic partner shares what was drawn for the same purpose
        drawn = self._kept.get(purpose) or draw()
        if self.antithetic:
            self._kept[purpose] = drawn
        return drawn if (sign or self._sign) == 1 else {name: -noise for name, noise in drawn.items()}

    def _key(self, name: str) -> Tensor:
        # off the CPU the noise does not depend on the key, and folding is slow
        return random.fold(self.key, _number(name)) if self.key.device.type == "cpu" else self.key

    def _note(self, name: str, way: str) -> None:
        if self.record.get(name) != way:  # compiled steps repeat each assignment
            self.record[name] = way


def _number(name: str) -> int:
    """Sixty-four bits that stand for a name (FNV-1a), in arithmetic that the compiler follows."""
    number = 0xCBF29CE484222325
    for byte in name.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return number


class GaussianWeight(Watched):
    """N(mean, scale²) in the place of a parameter; made by `gaussian`."""

    _mean: Tensor
    _scale: Tensor
    _noise: Any  # Noise or _Survey
    _estimator: str
    _name: str
    _tracked: bool  # whether gradients are wanted of its draw, wherever it is first used

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GaussianWeight({self._name!r}, shape={tuple(self.shape)}, estimator={self._estimator!r})"


def gaussian(mean: Tensor, scale: Tensor, noise: Noise, estimator: str = "weights", name: str | None = None) -> Tensor:
    """N(mean, scale²), elementwise, as a tensor that a network takes for a parameter.

    `mean` and `scale` have one shape; gradients flow to both. `name` tells the weights of one `Noise` apart (numbered where
    none is given). With estimator "weights" (or `FALLBACK`, which `survey` gives) it is sampled here and now: a plain tensor.
    With "local" and "flipout" it is a `GaussianWeight`, for this pass only. Using it again after its noise went into the outputs
    of a linear operation is a `RuntimeError`: `survey` tells which weights must be sampled instead.
    """
    if estimator != FALLBACK and estimator not in ESTIMATORS:
        raise ValueError(f"estimator: got {estimator!r}, expected one of {', '.join(map(repr, ESTIMATORS))}")
    name = _check(mean, scale, noise, name)
    if estimator not in ("weights", FALLBACK):
        return _made(mean, scale, noise, estimator, name)
    return _draw(mean, scale, noise, estimator, name, noise.normal(name, mean))


def gaussians(
    means: Mapping[str, Tensor], scales: Mapping[str, Tensor], noise: Noise, ways: str | Mapping[str, str]
) -> Weights:
    """`gaussian` for each name of `means`; `ways` is an estimator, or one for each name as `survey` gives it.

    The weights to be sampled share one draw of noise, which costs less than one draw each; what a weight gets then depends on
    the names drawn with it.
    """
    chosen = {name: ways if isinstance(ways, str) else ways[name] for name in means}
    sampled = {name: mean for name, mean in means.items() if chosen[name] in ("weights", FALLBACK)}
    # one call of the generator for all of them
    numbers = noise.normals(sampled)
    made = {}
    for name, mean in means.items():
        if name not in sampled:
            made[name] = gaussian(mean, scales[name], noise, chosen[name], name)
        else:
            _check(mean, scales[name], noise, name)
            made[name] = _draw(mean, scales[name], noise, chosen[name], name, numbers[name])
    return made


def survey(
    function: Callable[[Weights], Any],
    means: Mapping[str, Tensor],
    estimator: str,
    larger: Callable[[Weights], Any] | None = None,
) -> dict[str, str]:
    """For each weight how its noise can be drawn: the estimator where one linear operation uses it, and `FALLBACK` elsewhere.

    Where the operation uses the weight at several places of an example (convolutions, linear layers over a sequence), local noise
    would be independent between places that one draw of the weight moves together, and expectations under it are not those under q.
    Flipout has one draw for all places of an example: it is used there. Calls `function(weights)` once, at the means, in evaluation
    mode, and counts the uses of each weight. One that is used twice (tied, or in a module that is called in a loop), by other
    operations, or by code that hides its operations (a custom `torch.autograd.Function`, a scripted function) is to be sampled.

    Noise is told apart by the first axis of an operation. `larger` is `function` on one more example: where that axis does not
    grow by one (time comes first, positions share an axis with examples), one example would see several noises, and the weight
    is to be sampled.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator: got {estimator!r}, expected one of {', '.join(map(repr, ESTIMATORS))}")
    if estimator == "weights":
        return dict.fromkeys(means, estimator)
    # in the place of noise, so that the survey runs the same code as training
    count, more = _Survey(), _Survey()
    with torch.enable_grad():  # for `_Survey.count`
        detached = {name: mean.detach() for name, mean in means.items()}
        for run, found in ((function, count), (larger, more)):
            if run is not None:
                run({name: _made(mean, mean, found, estimator, name) for name, mean in detached.items()})
    ways: dict[tuple[str, ...], str] = {("linear",): estimator, ("places",): "flipout"}
    examples = {name for name in means if larger is None or more.firsts.get(name, 0) - count.firsts.get(name, 0) == 1}
    return {name: ways.get(tuple(count.uses.get(name, ())), FALLBACK) if name in examples else FALLBACK for name in means}


def log_density(
    draws: Mapping[str, Tensor], means: Mapping[str, Tensor], scales: Mapping[str, Tensor], *, detached: bool = False
) -> Tensor:
    """Log q(w) = Σ log N(w; μ, σ²) in nats, over the names of `draws` (say `noise.drawn`): 0-d.

    `detached=True` stops the gradient through μ and σ in the density, so that it flows through the draws alone: "sticking the
    landing" (Roeder, Wu & Duvenaud, 2017), whose estimate of the gradient has no variance where q is exact.
    """
    if not draws:
        raise ValueError("draws: got none; log q(w) needs sampled weights, from estimator='weights'")
    terms = []
    for name, draw in draws.items():
        mean, scale = means[name], scales[name]
        if detached:
            mean, scale = mean.detach(), scale.detach()
        standard = (draw - mean) / scale
        terms.append(-(0.5 * standard * standard + scale.log() + 0.5 * math.log(2 * math.pi)).sum())
    return torch.stack(terms).sum()


# ---------------------------------------------------------------------------------------------------------------------
# How a weight is used
class _Survey:
    """Stands in for a `Noise` while `survey` runs the network: each weight is its mean, and its uses are counted."""

    def __init__(self) -> None:
        self.uses: dict[str, list[str]] = {}
        self.firsts: dict[str, int] = {}  # the length of the first axis of what the last operation gave

    def count(self, name: str, use: str) -> None:
        if not torch.is_grad_enabled():  # inside a custom autograd function, which would see no gradient of the weight
            use = "hidden"
        self.uses[name] = [*self.uses.get(name, []), use]


class _Noisy(Interceptor):
    """What becomes of a `GaussianWeight`: its estimator in linear operations, a sampled weight anywhere else."""

    def name(self, value: Any) -> str | None:
        return value._name if isinstance(value, GaussianWeight) else None

    def value(self, value: Any) -> Any:
        return _value(value)

    def ask(self, asked: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if asked == "requires_grad":
            return args[0]._mean.requires_grad or args[0]._scale.requires_grad
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def linear(self, function: Any, input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """The output op(x, w), by the estimator of the weight, or of the bias where the weight is not random."""
        x, weight, bias = _value(input), _settled(weight), _settled(bias)
        if isinstance(weight, GaussianWeight) and isinstance(bias, GaussianWeight) and weight._estimator != bias._estimator:
            # no estimator fits both: sample them
            weight, bias = _value(weight), _value(bias)

        def op(x: Tensor, of: Callable[[GaussianWeight], Tensor], otherwise: Callable[[Any], Any]) -> Tensor:
            w, b = (of(part) if isinstance(part, GaussianWeight) else otherwise(part) for part in (weight, bias))
            return function(x, w, b, *rest, **options) if w is not None else b.reshape(-1, *[1] * AXES[function])

        mean = op(x, lambda part: part._mean, lambda value: value)
        parts = [part for part in (weight, bias) if isinstance(part, GaussianWeight)]
        if not parts:
            return mean
        noise, name = parts[0]._noise, parts[0]._name
        if isinstance(noise, _Survey):
            several = mean.numel() > math.prod(_per_example(mean, function))  # the weight acts at several places of one example
            for part in parts:
                noise.count(part._name, "places" if several else "linear")
                noise.firsts[part._name] = len(mean) if mean.ndim > AXES[function] + 1 else 0
            return mean
        for part in parts:
            if part._name in noise._spent:
                raise _used_again(part)
            noise._spent.add(part._name)
            noise._note(part._name, part._estimator)
        if parts[0]._estimator == "local":
            variance = op(x * x, lambda part: part._scale * part._scale, lambda _: None)
            return mean + _root(variance) * noise.normal(f"{name}: local", mean)
        signed = x * noise.signs(f"{name}: in", _per_example(x, function), x) if isinstance(weight, GaussianWeight) else x
        change = op(signed, lambda part: part._scale * noise.normal(part._name, part._mean), lambda _: None)
        return mean + change * noise.signs(f"{name}: out", _per_example(mean, function), mean)

    convolution = transposed = linear  # type: ignore[assignment]


GaussianWeight.interceptor = _Noisy()


def _per_example(x: Tensor, func: Any) -> list[int]:
    """The shape of signs for each example and channel; the first axis counts examples, where the channels are not the first."""
    spatial = AXES[func]
    # one sign for each example and channel, shared by places: a weight acts at all of them
    shape = [1] * x.dim()
    shape[-1 - spatial] = x.shape[-1 - spatial]
    if x.dim() > spatial + 1:
        shape[0] = x.shape[0]
    return shape


def _root(variance: Tensor) -> Tensor:
    """√v with gradient 0 at v = 0, and 0 for the v < 0 that rounding may leave."""
    positive = variance > 0
    return torch.where(positive, variance, 1.0).sqrt() * positive


def _settled(part: Any) -> Any:
    """The value of a weight that has been sampled; anything else as it is."""
    if isinstance(part, GaussianWeight) and not isinstance(part._noise, _Survey):
        return part._noise.drawn.get(part._name, part)
    return part


def _value(part: Any) -> Any:
    """The value of a weight, sampled now if it was not before; anything else as it is."""
    part = _settled(part)
    if not isinstance(part, GaussianWeight):
        return part
    noise, name = part._noise, part._name
    if isinstance(noise, _Survey):
        noise.count(name, "other")
        return part._mean
    if name in noise._spent:
        raise _used_again(part)
    # the first use may be under no_grad (a norm's statistics), a later one may need the gradient
    with torch.set_grad_enabled(part._tracked):
        return _draw(part._mean, part._scale, noise, FALLBACK, name, noise.normal(name, part._mean))


def _draw(mean: Tensor, scale: Tensor, noise: Noise, way: str, name: str, numbers: Tensor) -> Tensor:
    noise._note(name, way)
    noise.drawn[name] = drawn = torch.addcmul(mean, scale, numbers)
    return drawn


def _used_again(part: GaussianWeight) -> RuntimeError:
    return RuntimeError(
        f"weight {part._name!r} is used a second time in this pass, after its {part._estimator} noise went into the outputs of a "
        "linear operation; one draw for both uses must be sampled beforehand: take the estimators from stochastic.survey, or "
        "estimator='weights' (and make a new Noise for each forward pass)"
    )


def _made(mean: Tensor, scale: Tensor, noise: Noise | _Survey, estimator: str, name: str) -> GaussianWeight:
    if isinstance(noise, _Survey):
        values = mean
    else:
        # NaN without memory: code that reads past `__torch_function__` shows at once
        values = torch.full((), math.nan, dtype=mean.dtype, device=mean.device).expand(mean.shape)
    made: Any = values.as_subclass(GaussianWeight)
    made._mean, made._scale, made._noise, made._estimator, made._name = mean, scale, noise, estimator, name
    made._tracked = torch.is_grad_enabled()
    return made


def _check(mean: Tensor, scale: Tensor, noise: Noise, name: str | None) -> str:
    name = f"weight {len(noise._names)}" if name is None else name
    if name in noise._names:
        raise ValueError(f"name: {name!r} was given to two weights of one Noise, expected a name for each")
    if scale.shape != mean.shape or scale.dtype != mean.dtype:
        raise ValueError(
            f"scale of {name!r}: got shape {tuple(scale.shape)} of {scale.dtype}, expected those of its mean, "
            f"{tuple(mean.shape)} of {mean.dtype}; say scale.expand_as(mean)"
        )
    if not mean.is_floating_point():
        raise TypeError(f"mean of {name!r}: got {mean.dtype}, expected floating point")
    noise._names.add(name)
    return name
