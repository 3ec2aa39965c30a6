"""Ensemble: a combinator that runs one method several times, stacked on a leading axis."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch, Data
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights, concatenate, index, num_bytes, stack
from plausible.engine.method import Method, Plan, Traits, create
from plausible.methods.points.map import MAP
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.mixture import MixturePosterior

if TYPE_CHECKING:
    from plausible.engine import Fitted
    from plausible.testing import LinearGaussian

log = logging.getLogger("plausible")


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

    first: ClassVar[int] = 0  # the number of the first member
    name: ClassVar[str] = "ensemble"
    traits: ClassVar[Traits] = Traits(bias="as the method that it repeats")

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", create(self.method))
        if not isinstance(self.method, Method):
            raise TypeError(f"Ensemble: method must be a Method such as MAP(), got {self.method!r}")
        if self.method.members is not None:
            raise ValueError("Ensemble: an ensemble of ensembles is one larger ensemble; raise members instead")
        if self.method.verb != "iterate":
            raise ValueError(f"Ensemble: {type(self.method).__name__} runs its own chains; set them there")
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 1:
            raise ValueError(f"Ensemble: members must be a whole number of at least 1, got {self.members!r}")
        if self.init not in ("fresh", "given", "prior"):
            raise ValueError(f"Ensemble: init must be 'fresh', 'given' or 'prior', got {self.init!r}")

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """That of one member."""
        return self.method.plan(num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """As its members ask."""
        return self.method.prepare(model, data)

    def start(self, model: Model, key: Tensor) -> Any:
        """The members' states, stacked; refused before anything is allocated where memory cannot hold them."""
        one = self.method.start(model, key)
        held = num_bytes(one) + 3 * num_bytes(model.initial)
        require_memory(
            self.members * held,
            key.device,
            f"Ensemble of {self.members:,} members, each {held / 2**10:,.1f} KiB of weights, optimiser state and gradients",
        )
        if self.init == "fresh" and model.initial_draws is None and (kept := model.not_reinitialisable()):
            log.warning(
                "these weights cannot be initialised anew by reset_parameters and start alike in all members: %s; "
                "init='prior' draws them from the prior",
                ", ".join(kept),
            )
        alike = model.initial_draws is not None and len(next(iter(model.initial_draws.values()))) == 1
        same = self.members > 1 and (alike or (self.init == "given" and model.initial_draws is None))
        if same and not self.method.traits.noisy and self.plan(model.num_data).batch_size is None:
            log.warning(
                "all members start alike and see the same full batches: unless the network itself is random they stay copies of "
                "each other and show no epistemic uncertainty; use init='fresh' or a batch_size"
            )
        return stack(
            [
                self.method.start(self._starting(model, member), random.fold(key, member))
                for member in range(self.first, self.first + self.members)
            ]
        )

    def part(self, numbers: range) -> Ensemble:
        """These members alone, which start and step as they do in the whole: what one of several processes runs."""
        return _Part(self.method, len(numbers), self.init, numbers.start)

    def _starting(self, model: Model, member: int) -> Model:
        """The model at this member's starting point."""
        if model.initial_draws is not None:
            count = len(next(iter(model.initial_draws.values())))
            return model.starting_at(index(model.initial_draws, member % count))
        if self.init == "given":
            return model
        stream = random.generator(model.seed, 5, member)
        fresh = model.reinitialised(stream) if self.init == "fresh" else model.prior.sample(model.initial, stream)
        return model.starting_at({**model.buffers, **fresh})

    def step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """All members at once, by vmap; batches are stacked too unless all members see the whole data."""
        shared = batch.y.ndim == model.target_ndim
        axes: Any = None if shared else Batch(*(None if part is None else 0 for part in batch))  # type: ignore[arg-type]
        advance = torch.func.vmap(lambda s, b: self.method.step(model, s, b), in_dims=(0, axes), randomness="different")
        return advance(state, batch)

    def looped_step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """All members one after the other: for networks that vmap cannot stack."""
        shared = batch.y.ndim == model.target_ndim
        results = [self.method.step(model, index(state, k), batch if shared else index(batch, k)) for k in range(self.members)]
        return stack([new for new, _ in results]), stack([info for _, info in results])

    def kept(self, model: Model, state: Any) -> Weights:
        """Those of all members, in turn."""
        return concatenate([self.method.kept(model, index(state, k)) for k in range(self.members)])

    def held_out(self, model: Model, state: Any, batch: Batch) -> Tensor:
        """Summed held-out log-likelihood of each member: [members]."""
        return torch.stack([self.method.held_out(model, index(state, k), batch) for k in range(self.members)])

    def validated(self, state: Any, value: Tensor) -> tuple[Any, Tensor]:
        """Each member keeps its own best."""
        return self.method.validated(state, value)

    @classmethod
    def conforming(cls) -> Ensemble:
        """Three members."""
        return cls(MAP.conforming(), members=3)

    def quick(self) -> Ensemble:
        """Short runs of two members."""
        return replace(self, method=self.method.quick(), members=min(self.members, 2))

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """That of the method it repeats: the problem has one mode."""
        return self.method.conjugate(problem)

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """The draws of all members together, or an equal mixture of the members' posteriors."""
        if self.method.keeps_draws:
            return DrawsPosterior.of(self, model, fitted, chains=self.members)
        alone = fitted._replace(history={})  # which is the mean over members, and none of theirs
        parts = [self.method.posterior(model, alone._replace(state=index(fitted.state, k))) for k in range(self.members)]
        return MixturePosterior.of(self, model, fitted, parts)


@dataclass(frozen=True)
class _Part(Ensemble):
    """Some neighbouring members of an ensemble, known by their numbers in it."""

    first: int = 0  # type: ignore[misc]

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """That of an ensemble of these."""
        return Ensemble(self.method, self.members, self.init).posterior(model, fitted)
