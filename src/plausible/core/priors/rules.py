"""Priors, and densities of single weights: Gaussian, Laplace, Student's t, scale mixtures, horseshoe, log-uniform, flat."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.core.serialise import check_number, register
from plausible.core.special import EULER_GAMMA, scale_free_kl
from plausible.core.transforms import transformed


def total(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms) if (terms := list(terms)) else torch.zeros(())


class Prior(ABC):
    """log p(w) = Σ over names and elements; weights are dicts of tensors without a leading axis of draws.

    For stacked weights apply `torch.func.vmap` to `log_prob`.
    """

    @abstractmethod
    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        """The log density of each element of the weight called `name`; same shape as `weight`."""

    @abstractmethod
    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Independent draws for one weight, [*draws, *like.shape], on the generator's device in float32 or float64."""

    def rule(self, name: str) -> Prior:  # noqa: ARG002
        """The prior that applies to the weight called `name`, with patterns resolved."""
        return self

    @property
    def proper(self) -> bool:
        """Whether the density integrates to 1, so that there is something to sample."""
        return True

    @property
    def independent(self) -> bool:
        """Whether elements are independent of each other, so that each has a density of its own: `elementwise`."""
        return True

    @property
    def precision(self) -> float | None:
        """λ where log p(w) = −½λ‖w‖² + constant for all weights alike, else None."""
        return None

    def precisions(self, weights: Mapping[str, Tensor]) -> dict[str, float] | None:
        """λ of each weight by name where log p(w) = −½ Σ λ‖w‖² + constant, else None.

        The gradient −λw then needs no autograd: optimisers take it as `l2`.
        """
        return None if (shared := self.precision) is None else dict.fromkeys(weights, shared)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:  # noqa: ARG002
        """E log p(w) for the weight called `name` under w ~ N(mean, scale²), summed: 0-d; None where there is no closed form."""
        return None

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        return total(self.elementwise(name, weight).sum() for name, weight in weights.items())

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        """Weights drawn from the prior, with names, shapes, dtypes and devices of `like`.

        With `draws` every tensor gets a leading axis of that length. The generator may live on the CPU or on the
        weights' device; a CPU generator gives the same draws on every device. Improper priors raise ValueError.
        """
        if draws is not None and draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws!r}")
        leading = () if draws is None else (draws,)
        drawn = {}
        for name, weight in like.items():
            value = self.draw(name, weight.detach(), generator, leading)
            drawn[name] = value.to(device=weight.device, dtype=weight.dtype)
        return drawn


class Rule(Prior):
    """One density on the real line for every element: subclasses give `log_density` and `variate`.

    For `log_prob`, weights with fewer elements than `join_below` are laid end to end first: one pass over many small
    tensors instead of many passes.
    """

    join_below: ClassVar[float] = 2**14

    @abstractmethod
    def log_density(self, weight: Tensor) -> Tensor:
        """The log density of each element; same shape."""

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Independent draws on the generator's device."""
        raise ValueError(f"{type(self).__name__} is improper and cannot be sampled")

    def elementwise(self, name: str, weight: Tensor) -> Tensor:  # noqa: ARG002
        return self.log_density(weight)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        # many small tensors cost a kernel each; copying large ones would cost more
        small = [weight.reshape(-1) for weight in weights.values() if weight.numel() < self.join_below]
        parts = [weight for weight in weights.values() if weight.numel() >= self.join_below]
        return total(self.log_density(part).sum() for part in [*parts, *([torch.cat(small)] if small else [])])

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        if not self.proper:
            raise ValueError(
                f"cannot sample the weight {name!r} from {self!r}: this prior is improper, its density has no finite "
                "integral; choose a proper one, e.g. Gaussian(scale=1.0), or give LogUniform both bounds"
            )
        # half precision is drawn in float32 and rounded after
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self.variate((*draws, *like.shape), generator, dtype)


LOG_2PI = math.log(2 * math.pi)
SOFTENING = 1e-8  # poles at w = 0 are softened here: w² becomes w² + SOFTENING² (in units of the scale, where there is one)


def _log(value: float | Tensor) -> float | Tensor:
    """The logarithm of a setting; where settings are stacked it is a 0-d tensor."""
    return torch.log(value) if isinstance(value, Tensor) else math.log(value)


def _lgamma(value: float | Tensor) -> float | Tensor:
    return torch.lgamma(value) if isinstance(value, Tensor) else math.lgamma(value)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _uniform(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=dtype, device=generator.device)


def _sign(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return 1 - 2 * torch.randint(2, shape, generator=generator, device=generator.device).to(dtype)


def _squared_norm(weights: Sequence[Tensor]) -> Tensor:
    """Σ‖wᵢ‖²: many small tensors in one call, on a CPU each large one as a dot product, which is twice as fast there."""
    small = [weight for weight in weights if weight.is_cuda or weight.numel() < 20_000]
    parts = [torch.stack(torch._foreach_norm(small)).square_().sum()] if small else []
    parts += [torch.dot(flat, flat) for flat in (w.reshape(-1) for w in weights if not w.is_cuda and w.numel() >= 20_000)]
    return total(parts)


class _SquaredNorm(torch.autograd.Function):
    """Σ‖wᵢ‖² as one node of the graph: for a large network a fifth of the time of the plain expression."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return _squared_norm(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # for second derivatives; the list form cannot be differentiated again
            return tuple(2 * grad * weight for weight in ctx.saved_tensors)
        return torch._foreach_mul(ctx.saved_tensors, 2 * grad)


def centred_gaussian(weights: Mapping[str, Tensor], precisions: Mapping[str, float]) -> Tensor:
    """Σ log N(w; 0, 1/λ) over all elements, with the λ > 0 of each weight by name: a pass for each distinct λ."""
    groups: dict[float, list[Tensor]] = {}
    for name, weight in weights.items():
        groups.setdefault(precisions[name], []).append(weight)
    # constants of all weights in one number, not once for each
    constant = sum(0.5 * (math.log(each) - LOG_2PI) * sum(w.numel() for w in group) for each, group in groups.items())
    return total((-0.5 * each) * _square(group) for each, group in groups.items()) + constant


def _square(weights: Sequence[Tensor]) -> Tensor:
    # the list kernels want one type, and no transform around them
    if transformed() or any(weight.dtype != weights[0].dtype for weight in weights):
        return total(weight.square().sum() for weight in weights)
    return _SquaredNorm.apply(*weights) if torch.is_grad_enabled() else _squared_norm(weights)


@register
@dataclass(frozen=True)
class Gaussian(Rule):
    """N(w; loc, scale²): log p = −(w − loc)²/(2·scale²) − log scale − ½ log 2π."""

    scale: float = 1.0
    loc: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "scale", above=0)
        check_number(self, "loc")

    @property
    def precision(self) -> float | None:
        """1/scale² if centred at 0, else None (also where scales are stacked: they are no single number)."""
        single = not isinstance(self.scale, Tensor) and not isinstance(self.loc, Tensor)
        return self.scale**-2 if single and self.loc == 0 else None

    def log_density(self, weight: Tensor) -> Tensor:
        return -0.5 * self._residual(weight).square() - (_log(self.scale) + 0.5 * LOG_2PI)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        if not weights:
            return torch.zeros(())
        values = tuple(weights.values())
        # once for all weights, not once for each
        constant = sum(value.numel() for value in values) * (_log(self.scale) + 0.5 * LOG_2PI)
        if isinstance(self.loc, Tensor) or self.loc != 0:
            return -0.5 * total(self._residual(value).square().sum() for value in values) - constant
        return (-0.5 / self.scale**2) * _square(values) - constant

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG002
        centred = mean if not isinstance(self.loc, Tensor) and self.loc == 0 else mean - self.loc
        constant = mean.numel() * (_log(self.scale) + 0.5 * LOG_2PI)
        return (-0.5 / self.scale**2) * (centred * centred + scale * scale).sum() - constant

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self.loc + self.scale * _normal(shape, generator, dtype)

    def _residual(self, weight: Tensor) -> Tensor:
        centred = weight if not isinstance(self.loc, Tensor) and self.loc == 0 else weight - self.loc
        return centred / self.scale


@register
@dataclass(frozen=True)
class Laplace(Rule):
    """p(w) = e^(−|w|/scale)/(2·scale); variance 2·scale². The gradient at 0 is taken as 0."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "scale", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        return -weight.abs() / self.scale - _log(2 * self.scale)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG002
        """−Σ E|w|/scale − log(2·scale), with E|w| = σ√(2/π) e^(−μ²/2σ²) + μ erf(μ/σ√2)."""
        ratio = mean / scale
        size = scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio * ratio) + mean * torch.erf(ratio * math.sqrt(0.5))
        return -size.sum() / self.scale - mean.numel() * _log(2 * self.scale)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        # log1p(−u): u may be 0, never 1
        size = -torch.log1p(-_uniform(shape, generator, dtype))
        return self.scale * size * _sign(shape, generator, dtype)


@register
@dataclass(frozen=True)
class StudentT(Rule):
    """p(w) ∝ (1 + (w/scale)²/df)^(−(df + 1)/2): heavy tails, for df = 1 the Cauchy density."""

    df: float = 4.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "df", "scale", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        df = self.df
        constant = _lgamma((df + 1) / 2) - _lgamma(df / 2) - 0.5 * _log(df * math.pi) - _log(self.scale)
        return constant - 0.5 * (df + 1) * torch.log1p((weight / self.scale).square() / df)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        shapes = torch.full(shape, 0.5 * self.df, dtype=dtype, device=generator.device)
        chi_square = 2 * torch._standard_gamma(shapes, generator=generator)
        return self.scale * _normal(shape, generator, dtype) * torch.rsqrt(chi_square / self.df)


@register
@dataclass(frozen=True)
class ScaleMixture(Rule):
    """pi·N(w; 0, sigma1²) + (1 − pi)·N(w; 0, sigma2²), by a log-sum-exp that stays finite far out in the tails.

    Blundell et al. (2015), Weight uncertainty in neural networks, eq. 7; defaults from the grid of their section 5.1.
    """

    pi: float = 0.5
    sigma1: float = 1.0
    sigma2: float = math.exp(-6)

    def __post_init__(self) -> None:
        check_number(self, "pi", above=0, below=1)
        check_number(self, "sigma1", "sigma2", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        """The wide component's log density plus softplus of the (bounded above) log ratio narrow/wide."""
        other: Any = torch.log1p(-self.pi) if isinstance(self.pi, Tensor) else math.log1p(-self.pi)
        one, two = (_log(self.pi), self.sigma1), (other, self.sigma2)
        if isinstance(self.sigma1, Tensor) or isinstance(self.sigma2, Tensor):  # stacked
            order = torch.as_tensor(self.sigma1) >= torch.as_tensor(self.sigma2)
            log_wide, wide = (torch.where(order, a, b) for a, b in zip(one, two))  # type: ignore[call-overload]
            log_narrow, narrow = (torch.where(order, a, b) for a, b in zip(two, one))  # type: ignore[call-overload]
        else:
            # the ratio narrow/wide is bounded above: softplus of it never overflows
            (log_wide, wide), (log_narrow, narrow) = (one, two) if self.sigma1 >= self.sigma2 else (two, one)
        square = weight.square()
        ratio = log_narrow - log_wide + _log(wide / narrow) - 0.5 * (narrow**-2 - wide**-2) * square
        # PyTorch's threshold of 20 would lose digits of float64
        mixture = F.softplus(ratio, threshold=60.0) - (0.5 * wide**-2) * square
        return mixture + (log_wide - _log(wide) - 0.5 * LOG_2PI)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        chosen = _uniform(shape, generator, dtype) < self.pi
        scale = torch.where(chosen, self.sigma1, self.sigma2).to(dtype)
        return scale * _normal(shape, generator, dtype)


@register
@dataclass(frozen=True)
class Horseshoe(Rule):
    """w ~ N(0, λ²scale²), λ ~ C⁺(0, 1):  p(w) = e^u E₁(u)/(scale·√(2π³)),  u = w²/(2·scale²).

    Carvalho, Polson & Scott (2010), The horseshoe estimator for sparse signals, with the local scales λ integrated out.
    The density has a logarithmic pole at 0; u = (w²/scale² + 10⁻¹⁶)/2 softens it below |w| ≈ 10⁻⁸·scale, which changes
    its integral by less than 10⁻⁷ and keeps value and gradient finite everywhere.
    """

    join_below: ClassVar[float] = math.inf
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "scale", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        u = 0.5 * ((weight / self.scale).square() + SOFTENING**2)
        return _log_scaled_exponential_integral(u) - (_log(self.scale) + 0.5 * math.log(2 * math.pi**3))

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A normal variate times a half-Cauchy one, itself a ratio of normal variates."""
        first, second, third = (_normal(shape, generator, dtype) for _ in range(3))
        # a ratio of normals is Cauchy
        return self.scale * first * (second / third.abs().clamp_min(torch.finfo(dtype).tiny)).abs()


def _log_scaled_exponential_integral(u: Tensor) -> Tensor:
    """log(e^u E₁(u)) for u > 0, with gradients.

    Small u: E₁(u) = −γ − log u + Σ_k (−1)^(k+1) u^k/(k·k!).  Large u: e^u E₁(u) = 1/(u+1−1/(u+3−4/(u+5−9/(u+7−…)))),
    cut after n terms, its rest replaced by the first terms of its expansion for large n. Errors: 10⁻⁷ with n = 10 from
    u = 1 (float32), 2·10⁻¹⁴ with n = 24 from u = 2 (float64).
    """
    switch, terms, depth = (2.0, 24, 24) if u.dtype == torch.float64 else (1.0, 10, 10)
    # both branches are computed: each must be finite everywhere, for gradients too
    small, large = u.clamp(max=switch), u.clamp(min=switch)
    # Horner's scheme, from the highest power
    series = torch.zeros_like(small)
    for k in range(terms, 0, -1):
        series = series * small - (-1.0) ** k / (k * math.factorial(k))
    near = small + torch.log(series * small - EULER_GAMMA - torch.log(small))
    rest = 0.5 * (large + (2 * depth + 0.5) + torch.sqrt(large * (large + (4 * depth + 2)) - 0.25))
    for k in range(depth, 0, -1):
        rest = large + (2 * k - 1) - k * k / rest
    return torch.where(u <= switch, near, -torch.log(rest))


@register
@dataclass(frozen=True)
class LogUniform(Rule):
    """log|w| is uniform, the sign is even: p(w) = 1/(2|w|·log(high/low)) for low ≤ |w| ≤ high.

    Without bounds p(w) ∝ 1/|w| (Kingma, Salimans & Welling 2015, Variational dropout and the local reparameterization
    trick): *improper*, it cannot be sampled, and posteriors under it need not exist. Its log density −½ log(w² + 10⁻¹⁶)
    is softened below |w| ≈ 10⁻⁸. With bounds the log density is −∞ outside them.
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"LogUniform: give both bounds or neither, got low={self.low!r}, high={self.high!r}; "
                "with one bound the density is still improper"
            )
        if self.low is not None and self.high is not None:
            check_number(self, "low", above=0)
            check_number(self, "high", above=self.low)

    @property
    def proper(self) -> bool:
        return self.low is not None

    def log_density(self, weight: Tensor) -> Tensor:
        if self.low is None or self.high is None:
            return -0.5 * torch.log(weight.square() + SOFTENING**2)
        size = weight.abs()
        inside = (size >= self.low) & (size <= self.high)
        # clamped: the gradient outside would be that of log 0
        density = -torch.log(size.clamp(self.low, self.high)) - math.log(2 * math.log(self.high / self.low))
        return torch.where(inside, density, -math.inf)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:  # noqa: ARG002
        """−Σ E log|w| under w ~ N(mean, scale²), exact, where there are no bounds."""
        if self.low is not None:
            return None
        log_alpha = 2 * (scale.log() - mean.abs().clamp_min(1e-30).log())
        return (0.5 * (EULER_GAMMA + math.log(2)) - scale.log() - scale_free_kl(log_alpha)).sum()

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        if self.low is None or self.high is None:
            raise ValueError("LogUniform without bounds is improper and cannot be sampled")
        size = self.low * torch.exp(math.log(self.high / self.low) * _uniform(shape, generator, dtype))
        return size.clamp(self.low, self.high) * _sign(shape, generator, dtype)


@register
@dataclass(frozen=True)
class Flat(Rule):
    """p(w) ∝ 1, with log density 0: improper, it cannot be sampled. The MAP estimate is then maximum likelihood."""

    @property
    def proper(self) -> bool:
        return False

    @property
    def precision(self) -> float | None:
        return 0.0

    def log_density(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG002
        return torch.zeros((), dtype=mean.dtype, device=mean.device)
