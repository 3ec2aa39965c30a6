"""Priors over weights: a log density for every element, and draws from it.

A prior is a rule for all weights, or a mapping from name patterns to rules (`Patterns`), possibly scaled by fan-in
(`FanIn`). Elements are independent given their rule. Log densities are sums in nats, constants included, made of tensor
operations that work under `vmap`, `grad` and `torch.compile`. All priors are frozen dataclasses: hashable, comparable,
stored as JSON.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.optimisers import transformed
from plausible.serialise import check_number, register

__all__ = [
    "FanIn",
    "Flat",
    "Gaussian",
    "Horseshoe",
    "Laplace",
    "LogUniform",
    "Patterns",
    "Prior",
    "Rule",
    "ScaleMixture",
    "StudentT",
    "as_prior",
]

LOG_2PI = math.log(2 * math.pi)
EULER_GAMMA = 0.5772156649015329
SOFTENING = 1e-8
"""Poles at w = 0 are softened here: w² becomes w² + SOFTENING² (in units of the scale, where there is one)."""


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
    def precision(self) -> float | None:
        """λ where log p(w) = −½λ‖w‖² + constant for all weights alike, else None.

        The gradient −λw then needs no autograd: optimisers take it as `l2`.
        """
        return None

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum of the log densities of all elements of all weights: a 0-d tensor."""
        return _total(self.elementwise(name, weight).sum() for name, weight in weights.items())

    def sample(
        self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None
    ) -> dict[str, Tensor]:
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

    @abstractmethod
    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Independent draws on the generator's device."""

    def elementwise(self, name: str, weight: Tensor) -> Tensor:  # noqa: ARG002
        """The log density of each element, whatever the name."""
        return self.log_density(weight)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum of all log densities."""
        small = [weight.reshape(-1) for weight in weights.values() if weight.numel() < self.join_below]
        parts = [weight for weight in weights.values() if weight.numel() >= self.join_below]
        return _total(self.log_density(part).sum() for part in [*parts, *([torch.cat(small)] if small else [])])

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Independent draws, whatever the name."""
        if not self.proper:
            raise ValueError(
                f"cannot sample the weight {name!r} from {self!r}: this prior is improper, its density has no finite "
                "integral; choose a proper one, e.g. Gaussian(scale=1.0), or give LogUniform both bounds"
            )
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self.variate((*draws, *like.shape), generator, dtype)


def _total(terms: Iterable[Tensor]) -> Tensor:
    """The sum; 0 for no terms."""
    return functools.reduce(operator.add, terms) if (terms := list(terms)) else torch.zeros(())


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


def _uniform(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=dtype, device=generator.device)


def _sign(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return 1 - 2 * torch.randint(2, shape, generator=generator, device=generator.device).to(dtype)


def _squared_norm(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tuple(weights))).square_().sum()


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
        """1/scale² if centred at 0, else None."""
        return self.scale**-2 if self.loc == 0 else None

    def log_density(self, weight: Tensor) -> Tensor:
        """The normal log density."""
        return -0.5 * self._residual(weight).square() - (math.log(self.scale) + 0.5 * LOG_2PI)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum of all log densities; the constant is added once."""
        if not weights:
            return torch.zeros(())
        values = tuple(weights.values())
        constant = sum(value.numel() for value in values) * (math.log(self.scale) + 0.5 * LOG_2PI)
        plain = self.loc != 0 or transformed() or any(value.dtype != values[0].dtype for value in values)
        if not plain:
            square = _SquaredNorm.apply(*values) if torch.is_grad_enabled() else _squared_norm(values)
            return (-0.5 / self.scale**2) * square - constant
        return -0.5 * _total(self._residual(value).square().sum() for value in values) - constant

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A standard normal variate, scaled and moved."""
        return self.loc + self.scale * _normal(shape, generator, dtype)

    def _residual(self, weight: Tensor) -> Tensor:
        centred = weight - self.loc if self.loc else weight
        return centred / self.scale


@register
@dataclass(frozen=True)
class Laplace(Rule):
    """p(w) = e^(−|w|/scale)/(2·scale); variance 2·scale². The gradient at 0 is taken as 0."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "scale", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        """−|w|/scale − log(2·scale)."""
        return -weight.abs() / self.scale - math.log(2 * self.scale)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A random sign times an exponential variate."""
        size = -torch.log1p(-_uniform(shape, generator, dtype))
        return self.scale * size * _sign(shape, generator, dtype)


@register
@dataclass(frozen=True)
class StudentT(Rule):
    """p(w) ∝ (1 + (w/scale)²/df)^(−(df + 1)/2): heavy tails, for df = 1 the Cauchy density."""

    df: float = 4.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "df", above=0)
        check_number(self, "scale", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        """The Student log density."""
        df = self.df
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi) - math.log(self.scale)
        return constant - 0.5 * (df + 1) * torch.log1p((weight / self.scale).square() / df)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A normal variate over the root of a χ² variate per degree of freedom."""
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
        check_number(self, "sigma1", above=0)
        check_number(self, "sigma2", above=0)

    def log_density(self, weight: Tensor) -> Tensor:
        """The wide component's log density plus softplus of the (bounded above) log ratio narrow/wide."""
        one, two = (math.log(self.pi), self.sigma1), (math.log1p(-self.pi), self.sigma2)
        (log_wide, wide), (log_narrow, narrow) = (one, two) if self.sigma1 >= self.sigma2 else (two, one)
        square = weight.square()
        ratio = log_narrow - log_wide + math.log(wide / narrow) - 0.5 * (narrow**-2 - wide**-2) * square
        mixture = F.softplus(ratio, threshold=60.0) - (0.5 * wide**-2) * square
        return mixture + (log_wide - math.log(wide) - 0.5 * LOG_2PI)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A component for each element, then a normal variate of its scale."""
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
        """The logarithm of e^u E₁(u), normalised."""
        u = 0.5 * ((weight / self.scale).square() + SOFTENING**2)
        return _log_scaled_exponential_integral(u) - (math.log(self.scale) + 0.5 * math.log(2 * math.pi**3))

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A normal variate times a half-Cauchy one, itself a ratio of normal variates."""
        first, second, third = (_normal(shape, generator, dtype) for _ in range(3))
        return self.scale * first * (second / third.abs().clamp_min(torch.finfo(dtype).tiny)).abs()


def _log_scaled_exponential_integral(u: Tensor) -> Tensor:
    """log(e^u E₁(u)) for u > 0, with gradients.

    Small u: E₁(u) = −γ − log u + Σ_k (−1)^(k+1) u^k/(k·k!).  Large u: e^u E₁(u) = 1/(u+1−1/(u+3−4/(u+5−9/(u+7−…)))),
    cut after n terms, its rest replaced by the first terms of its expansion for large n. Errors: 10⁻⁷ with n = 10 from
    u = 1 (float32), 2·10⁻¹⁴ with n = 24 from u = 2 (float64).
    """
    switch, terms, depth = (2.0, 24, 24) if u.dtype == torch.float64 else (1.0, 10, 10)
    small, large = u.clamp(max=switch), u.clamp(min=switch)
    series = torch.full_like(small, _series_coefficient(terms))
    for k in range(terms - 1, 0, -1):
        series = series * small + _series_coefficient(k)
    near = small + torch.log(series * small - EULER_GAMMA - torch.log(small))
    rest = 0.5 * (large + (2 * depth + 0.5) + torch.sqrt(large * (large + (4 * depth + 2)) - 0.25))
    for k in range(depth, 0, -1):
        rest = large + (2 * k - 1) - k * k / rest
    return torch.where(u <= switch, near, -torch.log(rest))


def _series_coefficient(k: int) -> float:
    return -((-1.0) ** k) / (k * math.factorial(k))


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
        """True with bounds."""
        return self.low is not None

    def log_density(self, weight: Tensor) -> Tensor:
        """−log|w|, normalised where that is possible."""
        if self.low is None or self.high is None:
            return -0.5 * torch.log(weight.square() + SOFTENING**2)
        size = weight.abs()
        inside = (size >= self.low) & (size <= self.high)
        density = -torch.log(size.clamp(self.low, self.high)) - math.log(2 * math.log(self.high / self.low))
        return torch.where(inside, density, -math.inf)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """A random sign times low·(high/low)^uniform."""
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
        """False."""
        return False

    @property
    def precision(self) -> float | None:
        """0: no pull towards anything."""
        return 0.0

    def log_density(self, weight: Tensor) -> Tensor:
        """Zeros, without a gradient."""
        return torch.zeros_like(weight)

    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Refused."""
        raise ValueError("Flat is improper and cannot be sampled")


@register
@dataclass(frozen=True)
class Patterns(Prior):
    """A prior for each name pattern, e.g. `Patterns({"*.bias": Flat(), "*": Gaussian(0.5)})`; the first match wins.

    Patterns are shell-style (`*`, `?`, `[...]`), matched against the whole name with case. A weight without a match is
    an error. Stored as a tuple of pairs.
    """

    rules: tuple[tuple[str, Prior], ...]

    def __post_init__(self) -> None:
        pairs = self.rules.items() if isinstance(self.rules, Mapping) else self.rules
        try:
            pairs = tuple((pattern, prior) for pattern, prior in pairs)
        except (TypeError, ValueError):
            raise TypeError(f"Patterns: rules must map patterns to priors, got {self.rules!r}") from None
        if not pairs:
            raise ValueError('Patterns: rules is empty; give at least {"*": Gaussian(scale=1.0)}')
        for pattern, prior in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"Patterns: a pattern must be a string, got {pattern!r}")
            if not isinstance(prior, Prior):
                raise TypeError(f"Patterns: the rule for {pattern!r} must be a prior, got {prior!r}{_hint(prior)}")
        object.__setattr__(self, "rules", pairs)

    def rule(self, name: str) -> Prior:
        """The prior of the first pattern that matches."""
        return self.rules[self._index(name)][1].rule(name)

    def _index(self, name: str) -> int:
        patterns = tuple(pattern for pattern, _ in self.rules)
        return _first_match(name, patterns)

    @property
    def proper(self) -> bool:
        """Whether all rules are proper."""
        return all(prior.proper for _, prior in self.rules)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum over the rules, each applied to all its weights at once."""
        groups: list[dict[str, Tensor]] = [{} for _ in self.rules]
        for name, weight in weights.items():
            groups[self._index(name)][name] = weight
        return _total(prior.log_prob(group) for (_, prior), group in zip(self.rules, groups) if group)

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        """The log density by the rule of this name."""
        return self.rule(name).elementwise(name, weight)

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Draws by the rule of this name."""
        return self.rule(name).draw(name, like, generator, draws)


@register
@dataclass(frozen=True)
class FanIn(Prior):
    """w = z/√n with z from the base prior and n the fan-in: log p(w) = log p_z(w·√n) + ½ log n.

    Neal (1996), Bayesian learning for neural networks: the prior over functions keeps its scale as layers widen. n is
    the product of all axes but the first: inputs × kernel in linear and convolutional layers. Weights with fewer than
    two axes (biases, norms) and the likelihood's own weights keep the base prior as it is.
    """

    prior: Prior

    def __post_init__(self) -> None:
        if not isinstance(self.prior, Prior):
            raise TypeError(f"FanIn: prior must be a prior, got {self.prior!r}{_hint(self.prior)}")

    def rule(self, name: str) -> Prior:
        """The base rule of this name, scaled."""
        return FanIn(self.prior.rule(name))

    @property
    def proper(self) -> bool:
        """As the base prior."""
        return self.prior.proper

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The base prior's for all rescaled weights at once, with the Jacobian."""
        sizes = {name: _fan_in(name, weight) for name, weight in weights.items()}
        jacobian = sum(0.5 * math.log(sizes[name]) * weight.numel() for name, weight in weights.items())
        return self.prior.log_prob({name: w * math.sqrt(sizes[name]) for name, w in weights.items()}) + jacobian

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        """The log density of the rescaled weight, with the Jacobian."""
        fan_in = _fan_in(name, weight)
        base = self.prior.elementwise(name, weight * math.sqrt(fan_in))
        return base + 0.5 * math.log(fan_in)

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Draws of the base prior over √n."""
        return self.prior.draw(name, like, generator, draws) / math.sqrt(_fan_in(name, like))


def _first_match(name: str, patterns: tuple[str, ...]) -> int:
    for index, pattern in enumerate(patterns):
        if fnmatch.fnmatchcase(name, pattern):
            return index
    raise ValueError(
        f"no prior for the weight {name!r}: none of the patterns {', '.join(map(repr, patterns))} matches; add a rule "
        'for it, or a last rule "*" for all others'
    )


# A constant for torch.compile, as torch.compiler.assume_constant_result would mark it; that call imports the compiler,
# which takes longer than importing torch.
_first_match._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fan_in(name: str, weight: Tensor) -> int:
    if weight.ndim < 2 or name.startswith("likelihood."):
        return 1
    return max(math.prod(weight.shape[1:]), 1)


def _hint(value: Any) -> str:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return f"; did you mean Gaussian(scale={value})?"
    return ""


def as_prior(prior: Prior | Mapping[str, Prior] | None) -> Prior:
    """A prior as it is, a mapping from name patterns as `Patterns`, None as `Gaussian(scale=1.0)`."""
    if prior is None:
        return Gaussian(scale=1.0)
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Mapping):
        return Patterns(prior)  # type: ignore[arg-type]
    raise TypeError(
        f"prior must be one of plausible.priors, a mapping from name patterns to them, or None, got {prior!r} "
        f"of type {type(prior).__qualname__}{_hint(prior)}"
    )
