"""Priors made of priors: a rule per name pattern, and scales that fall with fan-in."""

from __future__ import annotations

import fnmatch
import glob
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.core.priors.rules import Gaussian, Prior, centred_gaussian, total
from plausible.core.serialise import register


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
            # a tuple: priors are hashable and compared
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
        return self.rules[self._index(name)][1].rule(name)

    def _index(self, name: str) -> int:
        return _first_match(name, tuple(pattern for pattern, _ in self.rules))

    @property
    def proper(self) -> bool:
        return all(prior.proper for _, prior in self.rules)

    @property
    def independent(self) -> bool:
        return all(prior.independent for _, prior in self.rules)

    def parted(self, weights: Mapping[str, Tensor]) -> list[tuple[str, Prior, dict[str, Tensor]]]:
        groups: list[dict[str, Tensor]] = [{} for _ in self.rules]
        for name, weight in weights.items():
            groups[self._index(name)][name] = weight
        return [(pattern, prior, group) for (pattern, prior), group in zip(self.rules, groups) if group]

    def precisions(self, weights: Mapping[str, Tensor]) -> dict[str, float] | None:
        known: dict[str, float] = {}
        for _, prior, group in self.parted(weights):
            part = prior.precisions(group)
            if part is None:
                return None
            known |= part
        return known

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        return total(prior.log_prob(group) for _, prior, group in self.parted(weights))

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        return self.rule(name).elementwise(name, weight)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:
        return self.rule(name).expectation(name, mean, scale)

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        return self.rule(name).draw(name, like, generator, draws)

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        if self.independent:
            return super().sample(like, generator, draws)
        drawn: dict[str, Tensor] = {}
        for _, prior, group in self.parted(like):
            drawn |= prior.sample(group, generator, draws)
        return {name: drawn[name] for name in like}


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
        return FanIn(self.prior.rule(name))

    @property
    def proper(self) -> bool:
        return self.prior.proper

    @property
    def independent(self) -> bool:
        return self.prior.independent

    def precisions(self, weights: Mapping[str, Tensor]) -> dict[str, float] | None:
        base = self.prior.precisions(weights)
        return None if base is None else {name: value * _fan_in(name, weights[name]) for name, value in base.items()}

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        if (known := self.precisions(weights)) and all(known.values()):  # no scaled copies of the weights; 0 is a flat prior
            return centred_gaussian(weights, known)
        sizes = {name: _fan_in(name, weight) for name, weight in weights.items()}
        # log |dz/dw|: a number, since n does not depend on w
        jacobian = sum(0.5 * math.log(sizes[name]) * weight.numel() for name, weight in weights.items())
        return self.prior.log_prob({name: w * math.sqrt(sizes[name]) for name, w in weights.items()}) + jacobian

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        fan_in = _fan_in(name, weight)
        base = self.prior.elementwise(name, weight * math.sqrt(fan_in))
        return base + 0.5 * math.log(fan_in)

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:
        fan_in = _fan_in(name, mean)
        base = self.prior.expectation(name, mean * math.sqrt(fan_in), scale * math.sqrt(fan_in))
        return None if base is None else base + 0.5 * math.log(fan_in) * mean.numel()

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        return self.prior.draw(name, like, generator, draws) / math.sqrt(_fan_in(name, like))

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        if self.independent:
            return super().sample(like, generator, draws)
        drawn = self.prior.sample(like, generator, draws)
        return {name: value / math.sqrt(_fan_in(name, like[name])) for name, value in drawn.items()}


@register
@dataclass(frozen=True, repr=False)
class Default(FanIn):
    """w = z/√n with z ~ N(0, 2²) and n the fan-in (1 for biases and norms); N(0, 1) for the log of a learned noise.

    Nobody's choice: what `fit` takes where no prior is given. Wide enough for one network to follow what data say, since early
    stopping keeps it from following their noise. It is a type of its own so that methods with an evidence know that its
    precisions are theirs to tune (`Laplace`), which those of a prior that somebody gave are not.
    """

    prior: Prior = field(default_factory=lambda: Patterns((("likelihood.*", Gaussian()), ("*", Gaussian(scale=2.0)))))

    def __repr__(self) -> str:
        return "Default()" if self == Default() else f"Default({self.prior!r})"


class Leaf(NamedTuple):
    """A prior that is not made of others, the patterns that lead to it, and its weights: w·√factor follow it."""

    prior: Prior
    path: str
    factors: dict[str, int]


def leaves(prior: Prior, weights: Mapping[str, Tensor]) -> list[Leaf]:
    """The priors that patterns and fan-in lead to, each with all its weights."""
    if isinstance(prior, Patterns):
        parts = [(pattern, leaf) for pattern, inner, group in prior.parted(weights) for leaf in leaves(inner, group)]
        return [leaf._replace(path=f"{pattern} {leaf.path}".strip()) for pattern, leaf in parts]
    if isinstance(prior, FanIn):
        return [
            leaf._replace(factors={n: factor * _fan_in(n, weights[n]) for n, factor in leaf.factors.items()})
            for leaf in leaves(prior.prior, weights)
        ]
    return [Leaf(prior, "", dict.fromkeys(weights, 1))]


def precision_of(prior: Prior, name: str, weight: Tensor) -> float | None:
    """λ of this weight where its prior is N(0, 1/λ) for all elements (0: flat), else None."""
    known = prior.precisions({name: weight})
    return None if known is None else known[name]


def by_name(rules: Mapping[str, Prior], others: Prior | None = None) -> Patterns:
    """A prior for each weight of exactly this name, whatever characters it has, and one for all others where it is given."""
    exact = [(glob.escape(name), rule) for name, rule in rules.items()]
    return Patterns((*exact, *([] if others is None else [("*", others)])))


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
    return 1 if weight.ndim < 2 or name.startswith("likelihood.") else max(math.prod(weight.shape[1:]), 1)


def _hint(value: Any) -> str:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return f"; did you mean Gaussian(scale={value})?"
    return ""


def as_prior(prior: Prior | Mapping[str, Prior] | None) -> Prior:
    """A prior as it is, a mapping from name patterns as `Patterns`, None as `Default()`."""
    if prior is None:
        return Default()
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Mapping):
        return Patterns(prior)  # type: ignore[arg-type]
    raise TypeError(
        f"prior must be one of plausible.priors, a mapping from name patterns to them, or None, got {prior!r} "
        f"of type {type(prior).__qualname__}{_hint(prior)}"
    )
