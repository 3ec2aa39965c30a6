"""Ensemble: a combinator that runs one method several times, stacked on a leading axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import index
from plausible.engine.method import Fitted, Method, Run, Stage, Traits, create
from plausible.methods.ensembles.stacking import FirstOfSeveral, Member, Stacked, of_member
from plausible.methods.points.map import MAP
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.mixture import MixturePosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class Ensemble(Method):
    """p(y | x, D) ≈ (1/K) Σ_k p(y | x, q_k)

    Several independent runs of one method, advanced together on a leading axis.

    With `MAP` this is a deep ensemble (Lakshminarayanan et al. 2017), with `SGLD` parallel chains. Members differ in their
    starting point (`init`: "fresh" re-initialises every layer, "prior" draws from the prior, "given" starts all at the
    module's weights), in the order of their batches and in their noise. Cost: that of `members` runs, less what stacking
    saves; memory: `members` states.
    """

    method: Method = field(default_factory=MAP)
    members: int = 5  # type: ignore[misc]
    init: Literal["fresh", "given", "prior"] = "fresh"

    name: ClassVar[str] = "ensemble"

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", create(self.method))
        if not isinstance(self.method, Method):
            raise TypeError(f"Ensemble: method must be a Method such as MAP(), got {self.method!r}")
        if self.method.members is not None:
            raise ValueError("Ensemble: an ensemble of ensembles is one larger ensemble; raise members instead")
        if self.method.traits.verb != "iterate":
            raise ValueError(f"Ensemble: {type(self.method).__name__} runs its own chains; set them there")
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 1:
            raise ValueError(f"Ensemble: members must be a whole number of at least 1, got {self.members!r}")
        if self.init not in ("fresh", "given", "prior"):
            raise ValueError(f"Ensemble: init must be 'fresh', 'given' or 'prior', got {self.init!r}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the method that it repeats."""
        return self.method.traits

    def stages(self) -> tuple[Stage, ...]:
        """The first stage of all members, stacked; then the later ones of each member in turn."""
        return self._stages(self.members, 0)

    def _stages(self, members: int, first: int) -> tuple[Stage, ...]:
        begin, *later = self.method.stages()
        if not later:
            return (Stacked(begin, members, self.init, first),)
        each = [Member(stage, k, first) for k in range(members) for stage in later]
        return (FirstOfSeveral(begin, members, self.init, first), *each)

    def part(self, numbers: range) -> Ensemble:
        """These members alone, which start and step as they do in the whole: what one of several processes runs."""
        return _Part(self.method, len(numbers), self.init, numbers.start)

    @classmethod
    def conforming(cls) -> Ensemble:
        """Three members."""
        return cls(MAP.conforming(), members=3)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """That of the method it repeats: the problem has one mode."""
        return self.method.conjugate(problem)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        """The draws of all members together, or an equal mixture of the members' posteriors."""
        if self.method.traits.keeps_draws:
            return DrawsPosterior.of(self, model, fitted, chains=self.members)
        alone = fitted._replace(history={})  # which is the mean over members, and none of theirs
        several = len(self.method.stages()) > 1
        parts = []
        for k in range(self.members):
            left = {"left": of_member(k, fitted.left)} if several else {"state": index(fitted.state, k)}
            parts.append(self.method.posterior(model, run, alone._replace(**left)))
        return MixturePosterior.of(self, model, fitted, parts)


@dataclass(frozen=True)
class _Part(Ensemble):
    """Some neighbouring members of an ensemble, known by their numbers in it."""

    first: int = 0

    def stages(self) -> tuple[Stage, ...]:
        return self._stages(self.members, self.first)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        """That of an ensemble of these."""
        return Ensemble(self.method, self.members, self.init).posterior(model, run, fitted)
