"""Likelihoods: network outputs f → a distribution over targets, p(y | f).

`likelihood(outputs)` is an elementwise `torch.distributions.Distribution`: outputs [..., N, *O] give a batch shape of [...,
*targets.shape] and an empty event shape; leading axes are draws. `check` refuses targets that do not fit (shape, type, range),
once for the data; calling the likelihood looks at no values, so it can live in a compiled step. A learned noise is a weight:
`likelihood.log_scale` or `likelihood.log_dispersion`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from plausible.core import distributions as densities
from plausible.core.serialise import check_count, register
from plausible.core.special import widest
from plausible.core.transforms import transformed

LOG_SCALE = "likelihood.log_scale"
LOG_DISPERSION = "likelihood.log_dispersion"
LOG_DF = "likelihood.log_df"
LEAST_DF, TYPICAL_DF = 2.0, 6.0  # learned degrees of freedom are the first plus the second times e^w: there is a variance


class Likelihood(ABC):
    """p(y | f): the base of all likelihoods, which are frozen dataclasses.

    A new one states its `kind`, how outputs become a distribution (`__call__`) and, where they differ from the defaults
    here, the shape of targets (`target_shape`) and weights of its own (`initial_weights`).
    """

    kind: ClassVar[str]  # what targets are: "classes" (integers), "binary", "continuous" or "counts"; decides type and range

    @abstractmethod
    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Distribution:
        """The distribution of targets given outputs [..., N, *O]; learned noise has the leading axes of the outputs."""

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of targets for outputs of this shape, here the same; ValueError where outputs cannot be right."""
        return tuple(outputs_shape)

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:  # noqa: ARG002
        """The likelihood's own weights to start from, here none; `output_shape` is that of one input."""
        return {}

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The log density of each target, [..., *targets.shape]: `self(outputs, weights).log_prob(targets)`."""
        self._refuse_broadcasting(outputs, targets)
        return self(outputs, weights).log_prob(targets.to(outputs.dtype))

    def total(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """The log densities of all targets of one draw, summed: what a training step needs, in few operations."""
        return self.log_prob(outputs, targets, weights).sum()

    def check(self, outputs_shape: Sequence[int], targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Refuse targets that do not belong to outputs of shape [N, *O]; return them in the type of their kind.

        That is int64 for classes, floating point otherwise (float32 and float64 stay what they are). `mask` is boolean
        and shaped like `targets`, True where a target was observed; the others are not looked at, and come back as 0,
        which every likelihood accepts. TypeError for a type, ValueError for a shape or a value that does not fit.
        """
        targets = _typed(type(self).__name__, self.kind, torch.as_tensor(targets))
        expected = self.target_shape(outputs_shape)
        if tuple(targets.shape) != expected:
            raise _shape_error(type(self).__name__, outputs_shape, expected, tuple(targets.shape))
        if mask is not None and (mask.dtype != torch.bool or mask.shape != targets.shape):
            raise ValueError(
                f"mask must be boolean (True where a target was observed) and shaped like the targets, "
                f"{list(targets.shape)}; got {mask.dtype} of shape {list(mask.shape)}"
            )
        if (mask := self.observed(targets, mask)) is not None:
            targets = torch.where(mask, targets, torch.zeros_like(targets))
        _check_values(self.kind, targets, outputs_shape)
        return targets

    def standardised(self, targets: Tensor) -> tuple[Likelihood, Tensor, float]:
        """The likelihood inside, targets in its units, and what log densities of an example lose on the way back: here nothing."""
        return self, targets, 0.0

    def in_units(self, outputs: Tensor) -> Tensor:
        """Outputs that are locations of the targets in the units of these; other outputs as they are."""
        return outputs

    def observed(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:  # noqa: ARG002
        """The mask of targets that count, shaped like them: here what was given (None: all of them)."""
        return mask

    def _refuse_broadcasting(self, outputs: Tensor, targets: Tensor) -> None:
        """Targets must be the trailing axes of [..., N, *]: static shapes only, free of cost in a compiled step."""
        # [N] against [N, 1] would broadcast to [N, N] and train on nonsense
        expected = self.target_shape(outputs.shape)
        if targets.ndim > len(expected) or expected[len(expected) - targets.ndim :] != tuple(targets.shape):
            raise _shape_error(type(self).__name__, outputs.shape, expected, tuple(targets.shape))


@register
@dataclass(frozen=True)
class Categorical(Likelihood):
    """p(y = c | f) = exp(f_c) / Σ_k exp(f_k).

    Outputs are logits [..., N, C] with the class axis last (dense: [..., N, H, W, C]); targets are integers in [0, C)
    of shape [N] (dense: [N, H, W]). Targets equal to `ignore_index` (-100 by the custom of others; None: there are none) say
    nothing: they are left out of fits, densities and metrics.
    """

    ignore_index: int | None = None
    kind: ClassVar[str] = "classes"

    def __post_init__(self) -> None:
        if self.ignore_index is not None:
            check_count(self, "ignore_index", at_least=None)

    def observed(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:
        if self.ignore_index is None:
            return mask
        said = targets != self.ignore_index
        return said if mask is None else said & mask

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Categorical:  # noqa: ARG002
        return distributions.Categorical(logits=outputs, validate_args=False)

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:  # noqa: ARG002
        self._refuse_broadcasting(outputs, targets)
        # the fused kernel, where there are no draws in front
        if outputs.ndim == 2:
            return -F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=self._ignored)
        observed = self.observed(targets)
        classes = targets.long() if observed is None else torch.where(observed, targets.long(), 0)
        each = outputs.log_softmax(-1).gather(-1, classes.expand(outputs.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        return each if observed is None else torch.where(observed, each, 0.0)

    def total(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        if outputs.ndim == 2 and outputs.shape[:1] == targets.shape:
            return -F.cross_entropy(outputs, targets.long(), reduction="sum", ignore_index=self._ignored)
        return super().total(outputs, targets, weights)

    @property
    def _ignored(self) -> int:
        return -100 if self.ignore_index is None else self.ignore_index  # PyTorch's own default, which no checked class is

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        if len(outputs_shape) < 2 or outputs_shape[-1] == 1:
            raise ValueError(
                f"Categorical needs logits of shape [N, classes] with at least 2 classes, the outputs have shape "
                f"{list(outputs_shape)}: give the network one output per class, or use likelihoods.Bernoulli() for one "
                "logit per target"
            )
        return tuple(outputs_shape[:-1])


@register
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """p(y = 1 | f) = 1 / (1 + e^{−f}), each output on its own.

    Outputs are logits [..., N] or [..., N, L] (several labels at once); targets have the same shape and are 0 or 1
    (boolean, integer or float).
    """

    kind: ClassVar[str] = "binary"

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Bernoulli:  # noqa: ARG002
        return distributions.Bernoulli(logits=outputs, validate_args=False)


class _Located(Likelihood):
    """What Gaussian and StudentT share: outputs are locations; the scale is fixed, learned, or learned per output."""

    kind: ClassVar[str] = "continuous"
    scale: Any
    initial: float

    def __post_init__(self) -> None:
        _set_noise(self, "scale", ("learned", "per-output"))

    def _scale(self, outputs: Tensor, weights: Mapping[str, Tensor] | None, log: bool = False) -> Tensor:
        if isinstance(self.scale, str):
            log_scale = densities.aligned(LOG_SCALE, outputs, weights, own_axes=int(self.scale == "per-output"))
            return log_scale if log else log_scale.exp()
        scale = densities.constant("scale", self.scale, outputs, outputs.shape)
        return scale.log() if log else scale

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
        if not isinstance(self.scale, str):
            return {}
        if self.scale == "per-output" and not output_shape:
            raise ValueError("scale='per-output' needs outputs of shape [N, O], these have shape [N]: use scale='learned'")
        shape = output_shape[-1:] if self.scale == "per-output" else ()
        return {LOG_SCALE: torch.full(shape, math.log(self.initial), dtype=dtype, device=device)}


@register
@dataclass(frozen=True)
class Gaussian(_Located):
    """p(y | f) = N(y; f, σ²).

    Outputs and targets have the same shape, [..., N, *O]. σ is `scale`: a number, one number per output (last axis), "learned"
    (weight `likelihood.log_scale`, shape ()) or "per-output" (learned, shape (O,)); a learned scale starts at `initial`.
    """

    scale: Any = "learned"
    initial: float = 1.0

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Normal:
        return distributions.Normal(outputs, self._scale(outputs, weights), validate_args=False)

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        self._refuse_broadcasting(outputs, targets)
        # by the logarithm: a learned scale is held as one, and exp then log would lose digits
        log_scale = self._scale(outputs, weights, log=True)
        z = (targets.to(outputs.dtype) - outputs) * torch.exp(-0.5 * math.log(2) - log_scale)  # z² is half the square
        return (-0.5 * math.log(2 * math.pi) - log_scale) - z * z

    def total(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        log_scale = (weights or {}).get(LOG_SCALE) if self.scale == "learned" else None
        # one σ for all targets: it can be taken out of the sum
        one = isinstance(self.scale, float) or (log_scale is not None and log_scale.ndim == 0)
        if not one or outputs.shape != targets.shape:
            return super().total(outputs, targets, weights)
        targets, count = targets.to(outputs.dtype), outputs.numel()
        if transformed():  # vmap inside vmap has a wrong rule for mse_loss
            squares = (outputs - targets).square().sum()
        else:
            # one kernel, where the plain expression has three and keeps what they leave
            squares = F.mse_loss(outputs, targets, reduction="sum")
        # the sum of N constants in one number: a training step should not add them one by one
        constant = 0.5 * count * math.log(2 * math.pi)
        if log_scale is None:
            return squares * (-0.5 / self.scale**2) - (count * math.log(self.scale) + constant)
        return squares * (-0.5 * torch.exp(-2 * log_scale)) - (count * log_scale + constant)


@register
@dataclass(frozen=True)
class StudentT(_Located):
    """p(y | f) = t_df(y; location f, scale σ): a regression that shrugs at outliers; variance σ²·df/(df − 2).

    Shapes and `scale` as in `Gaussian`. `df` > 0 is a number (the variance is infinite for df ≤ 2) or "learned": weight
    `likelihood.log_df` = log((df − 2)/6), which starts at 0 (df = 8), so that a centred prior is one of moderate tails.
    """

    df: Any = 4.0
    scale: Any = "learned"
    initial: float = 1.0

    def __post_init__(self) -> None:
        if self.df != "learned":
            object.__setattr__(self, "df", _positive("df", self.df))
        _Located.__post_init__(self)

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> densities.StudentT:
        return densities.StudentT(degrees(self.df, outputs, weights), outputs, self._scale(outputs, weights))

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
        own = super().initial_weights(output_shape, dtype=dtype, device=device)
        return own | _initial_degrees(self.df, dtype, device)


def degrees(df: Any, outputs: Tensor, weights: Mapping[str, Tensor] | None) -> Tensor:
    """Degrees of freedom, fixed or learned, to broadcast with the outputs."""
    if df == "learned":
        return LEAST_DF + TYPICAL_DF * densities.aligned(LOG_DF, outputs, weights, own_axes=0).exp()
    return outputs.new_full((), df)  # filled on the device: a copy from the host could not be captured in a CUDA graph


def _initial_degrees(df: Any, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
    return {LOG_DF: torch.zeros((), dtype=dtype, device=device)} if df == "learned" else {}


class MeanAndNoise(Likelihood):
    """What Gaussians share whose noise depends on the input: outputs [..., N, 2K], targets [N, K]."""

    kind: ClassVar[str] = "continuous"
    second: ClassVar[str]  # what the second half of the outputs is

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        if len(outputs_shape) < 2 or outputs_shape[-1] % 2:
            raise ValueError(
                f"{type(self).__name__} needs outputs of shape [N, 2K], K means and then K {self.second}, got "
                f"{list(outputs_shape)}: give the network two outputs per target"
            )
        return (*outputs_shape[:-1], outputs_shape[-1] // 2)


@register
@dataclass(frozen=True)
class HeteroscedasticGaussian(MeanAndNoise):
    """p(y | f) = N(y; m, s²) with m the first half of the last axis of f and s = minimum + softplus(second half).

    Outputs [..., N, 2K], targets [N, K]: the noise depends on the input (Nix & Weigend 1994).
    """

    minimum: float = 1e-3
    second: ClassVar[str] = "raw scales"

    def __post_init__(self) -> None:
        object.__setattr__(self, "minimum", _positive("minimum", self.minimum))

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Normal:  # noqa: ARG002
        mean, raw = outputs.chunk(2, -1)
        return distributions.Normal(mean, self.minimum + F.softplus(raw), validate_args=False)


@register
@dataclass(frozen=True)
class HeteroscedasticStudentT(MeanAndNoise):
    """p(y | f) = t_df(y; location m, scale s) with m the first half of the last axis of f and s = minimum + softplus(second half).

    Outputs [..., N, 2K], targets [N, K]: noise that depends on the input, with outliers. `df` is a number or "learned", as of
    `StudentT`.
    """

    df: Any = "learned"
    minimum: float = 1e-3
    second: ClassVar[str] = "raw scales"

    def __post_init__(self) -> None:
        if self.df != "learned":
            object.__setattr__(self, "df", _positive("df", self.df))
        object.__setattr__(self, "minimum", _positive("minimum", self.minimum))

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> densities.StudentT:
        mean, raw = outputs.chunk(2, -1)
        return densities.StudentT(degrees(self.df, mean, weights), mean, self.minimum + F.softplus(raw))

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:  # noqa: ARG002
        return _initial_degrees(self.df, dtype, device)


@register
@dataclass(frozen=True)
class Poisson(Likelihood):
    """p(y = k | f) = e^{kf − e^f} / k!: counts with rate e^f. Outputs (log rates) and targets have the same shape."""

    kind: ClassVar[str] = "counts"

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> densities.Poisson:  # noqa: ARG002
        return densities.Poisson(outputs)


@register
@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    """Counts with mean μ = e^f and variance μ + μ²/r, more scattered than Poisson's; r is the `dispersion`.

    `dispersion` is a number or "learned" (weight `likelihood.log_dispersion`, shape (), starting at `initial`); r → ∞
    is Poisson. Outputs and targets have the same shape.
    """

    dispersion: Any = "learned"
    initial: float = 1.0
    kind: ClassVar[str] = "counts"

    def __post_init__(self) -> None:
        if not isinstance(self.dispersion, str):  # one number: `_set_noise` would take several
            _positive("dispersion", self.dispersion)
        _set_noise(self, "dispersion", ("learned",))

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> densities.NegativeBinomial:
        if self.dispersion == "learned":
            return densities.NegativeBinomial(outputs, densities.aligned(LOG_DISPERSION, outputs, weights, own_axes=0))
        return densities.NegativeBinomial(outputs, outputs.new_full((), math.log(self.dispersion)))

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:  # noqa: ARG002
        start = torch.full((), math.log(self.initial), dtype=dtype, device=device)
        return {LOG_DISPERSION: start} if self.dispersion == "learned" else {}


@register
@dataclass(frozen=True)
class Scaled(Likelihood):
    """y = loc + scale·z with z ~ `likelihood`: a model of standardised targets that speaks in their original units.

    `loc` and `scale` (nonzero) are numbers or one number per output. Outputs and weights are those of `likelihood`,
    which must be continuous.
    """

    likelihood: Likelihood
    loc: Any
    scale: Any
    kind: ClassVar[str] = "continuous"

    def __post_init__(self) -> None:
        if not isinstance(self.likelihood, Likelihood) or self.likelihood.kind != "continuous":
            raise TypeError(f"Scaled needs a continuous likelihood such as Gaussian(), got {self.likelihood!r}")
        object.__setattr__(self, "loc", _numbers("loc", self.loc, math.isfinite, "finite"))
        object.__setattr__(self, "scale", _numbers("scale", self.scale, lambda v: v != 0, "finite and nonzero"))

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> densities.Affine:
        base = self.likelihood(outputs, weights)
        loc, scale = (densities.constant(n, getattr(self, n), outputs, base.batch_shape) for n in ("loc", "scale"))
        return densities.Affine(base, loc, scale)

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        return self.likelihood.target_shape(outputs_shape)

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        self._refuse_broadcasting(outputs, targets)
        _, scale = self._constants(targets)
        return self.likelihood.log_prob(outputs, self._inside(targets), weights) - scale.abs().log().to(outputs.dtype)

    def total(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        self._refuse_broadcasting(outputs, targets)
        inside = self.likelihood.total(outputs, self._inside(targets), weights)
        draws = math.prod(outputs.shape[: outputs.ndim - targets.ndim])
        return inside - draws * targets.numel() * (sum(map(math.log, map(abs, self._scales))) / len(self._scales))

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
        return self.likelihood.initial_weights(output_shape, dtype=dtype, device=device)

    def standardised(self, targets: Tensor) -> tuple[Likelihood, Tensor, float]:
        inner, inside, lost = self.likelihood.standardised(self._inside(targets))
        each = targets[0].numel()
        return inner, inside, lost + each * sum(map(math.log, map(abs, self._scales))) / len(self._scales)

    def in_units(self, outputs: Tensor) -> Tensor:
        inside = self.likelihood.in_units(outputs)
        if not isinstance(unscaled(self.likelihood), _Located):  # further outputs are no locations
            return inside
        loc, scale = self._constants(inside.to(widest(inside.device)))
        return loc + scale * inside

    def _inside(self, targets: Tensor) -> Tensor:
        """(y − loc)/scale, in the type of y: an offset that dwarfs the spread must not be rounded away before."""
        loc, scale = self._constants(targets)
        return (targets - loc) / scale

    def _constants(self, like: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = (densities.constant(name, getattr(self, name), like, like.shape) for name in ("loc", "scale"))
        return loc, scale

    @property
    def _scales(self) -> tuple[float, ...]:
        return self.scale if isinstance(self.scale, tuple) else (self.scale,)


def unscaled(likelihood: Likelihood) -> Likelihood:
    """What `Scaled` ones scale."""
    while isinstance(likelihood, Scaled):
        likelihood = likelihood.likelihood
    return likelihood


def infer(targets: Tensor) -> Likelihood:
    """The usual likelihood: integers → Categorical, booleans → Bernoulli, floats → Gaussian with learned noise."""
    targets = torch.as_tensor(targets)
    if targets.is_floating_point():
        return Gaussian()
    return Bernoulli() if targets.dtype == torch.bool else Categorical()


def _numbers(name: str, value: Any, allowed: Callable[[float], bool], what: str) -> float | tuple[float, ...]:
    """A setting as a float, or as a tuple of floats from any sequence, array or tensor."""
    try:
        plain = value.tolist() if hasattr(value, "tolist") else value
        numbers = tuple(float(v) for v in plain) if isinstance(plain, list | tuple) else float(plain)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a sequence of numbers, got {value!r}") from None
    # True is a number to Python and a mistake here
    each = numbers if isinstance(numbers, tuple) else (numbers,)
    if isinstance(plain, bool) or not each or not all(math.isfinite(v) and allowed(v) for v in each):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return numbers


def _positive(name: str, value: Any) -> float:
    if isinstance(number := _numbers(name, value, lambda v: v > 0, "positive and finite"), tuple):
        raise ValueError(f"{name} must be one number, got {value!r}")
    return number


def _set_noise(likelihood: Any, name: str, words: tuple[str, ...]) -> None:
    """Validate the noise setting `name` (one of `words`, or positive numbers) and where a learned one starts."""
    value = getattr(likelihood, name)
    if isinstance(value, str):
        if value not in words:
            raise ValueError(f"{name} must be positive numbers or {' or '.join(map(repr, words))}, got {value!r}")
    else:
        object.__setattr__(likelihood, name, _numbers(name, value, lambda v: v > 0, "positive and finite"))
        # a start that nothing starts from is a mistake, not a setting
        if likelihood.initial != 1.0:
            raise ValueError(f"initial={likelihood.initial} starts a learned {name}, but {name}={value!r} is fixed")
    object.__setattr__(likelihood, "initial", _positive("initial", likelihood.initial))


def _typed(name: str, kind: str, targets: Tensor) -> Tensor:
    """Targets in the type of their kind; TypeError where that would be a guess."""
    if targets.is_complex():
        raise TypeError(f"targets are complex ({targets.dtype}), expected real numbers")
    if kind == "classes":
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TypeError(
                f"targets are {targets.dtype}, but {name} needs class numbers: pass targets.long(), for one-hot rows "
                "targets.argmax(-1), or choose likelihoods.Gaussian() for a regression, likelihoods.Bernoulli() for 0/1"
            )
        return targets.long()
    if kind == "continuous" and not targets.is_floating_point():
        raise TypeError(
            f"targets are {targets.dtype}, but {name} needs real numbers: pass targets.float(), or choose "
            "likelihoods.Categorical() for classes or likelihoods.Poisson() for counts"
        )
    return targets if targets.is_floating_point() else targets.to(torch.get_default_dtype())


def _check_values(kind: str, targets: Tensor, outputs_shape: Sequence[int]) -> None:
    def refuse(bad: Tensor, rule: str, fix: str) -> None:
        if bool(bad.any()):
            # the first culprit is named: in a large table nobody finds it otherwise
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{rule}, got {targets[tuple(where)].item():.7g} at index {where} ({int(bad.sum())} such values): {fix}"
            )

    if targets.is_floating_point():
        fix = "remove or impute those rows, or pass mask= (True where a target was observed)"
        refuse(~torch.isfinite(targets), "targets must be finite", fix)
    if kind == "classes":
        last = outputs_shape[-1] - 1
        rule = f"class labels must lie in 0..{last}, because the network has {last + 1} outputs"
        fix = "number the classes from 0 and give each one output"
        if bool((targets == -100).any()):
            fix = "where -100 marks targets to leave out, use likelihoods.Categorical(ignore_index=-100)"
        refuse((targets < 0) | (targets > last), rule, fix)
    elif kind == "binary":
        fix = "use likelihoods.Categorical() for more than two classes"
        refuse((targets != 0) & (targets != 1), "targets must be 0 or 1", fix)
    elif kind == "counts":
        fix = "use likelihoods.Gaussian() for real numbers"
        refuse((targets < 0) | (targets != targets.floor()), "counts must be integers 0, 1, 2, ...", fix)


def _shape_error(name: str, outputs: Sequence[int], expected: tuple[int, ...], got: tuple[int, ...]) -> ValueError:
    if got == expected[:-1] and expected[-1] == 1:
        fix = "they would broadcast; pass y.unsqueeze(-1), the same as y[:, None]"
    elif got[:-1] == expected and got[-1] == 1:
        fix = "they would broadcast; pass y.squeeze(-1)"
    # from the likeliest mistake to the least
    elif got and expected and got[0] != expected[0]:
        fix = f"there are {expected[0]} inputs and {got[0]} targets; pass one target for each input"
    elif name == "Categorical" and len(outputs) > 2 and got == (outputs[0], *outputs[2:]):
        fix = "the classes are the second axis; move them last with output=lambda f: f.movedim(1, -1)"
    elif name == "Categorical" and got == tuple(outputs):
        fix = "pass class numbers; for one-hot rows y.argmax(-1)"
    elif name == "Gaussian" and got == expected[:-1] and expected[-1] > 1:
        fix = "change the network's last layer; or, if these are classes, pass them as integers, y.long(), for Categorical"
    else:
        fix = "change the network's last layer or the shape of the targets"
    return ValueError(
        f"targets have shape {list(got)}, {name} expects {list(expected)} for outputs of shape {list(outputs)}: {fix}"
    )
