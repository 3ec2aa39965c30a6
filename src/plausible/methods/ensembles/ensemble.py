"""Ensemble: a combinator that runs one method several times, stacked on a leading axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights, concatenate, index, num_bytes, stack
from plausible.core.words import log
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Stage, Traits, check_choice, create
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
    module's weights), in their batches and their noise. Cost: that of `members` runs, less what stacking saves; memory:
    `members` states.
    """

    method: Method = field(default_factory=MAP)
    members: int = 5  # type: ignore[misc]
    init: Literal["fresh", "given", "prior"] = "fresh"

    name: ClassVar[str] = "ensemble"
    first: ClassVar[int] = 0  # the number of its first member, where it is a part of another

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", create(self.method))
        if not isinstance(self.method, Method):
            raise TypeError(f"Ensemble: method must be a Method such as MAP(), got {self.method!r}")
        if self.method.members is not None:
            raise ValueError("Ensemble: an ensemble of ensembles is one larger ensemble; raise members instead")
        if self.method.traits.verb == "choose":
            raise ValueError(
                f"Ensemble: {type(self.method).__name__} chooses by the data, in fit; name the method of the members, such as MAP()"
            )
        if self.method.traits.verb != "iterate":
            raise ValueError(f"Ensemble: {type(self.method).__name__} runs its own chains; set them there")
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 1:
            raise ValueError(f"Ensemble: members must be a whole number of at least 1, got {self.members!r}")
        check_choice(self, "init", ("fresh", "given", "prior"))

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.method.traits

    def stages(self) -> tuple[Stage, ...]:
        """The first stage of all members, stacked; then the later ones of each member in turn."""
        begin, *later = self.method.stages()
        if not later:
            return (Stacked(begin, self.members, self.init, self.first),)
        each = [Member(stage, k, self.first) for k in range(self.members) for stage in later]
        return (FirstOfSeveral(begin, self.members, self.init, self.first), *each)

    def part(self, numbers: range) -> Ensemble:
        """These members alone, which start and step as they do in the whole: what one of several processes runs."""
        return _Part(self.method, len(numbers), self.init, numbers.start)

    @classmethod
    def conforming(cls) -> Ensemble:
        return cls(MAP.conforming(), members=3)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        # that of the method it repeats: the problem has one mode
        return self.method.conjugate(problem)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        """The draws of all members together, or an equal mixture of the members' posteriors."""
        if self.method.traits.keeps_draws:
            return DrawsPosterior.of(self, model, fitted, chains=self.members)
        alone = fitted._replace(history={})  # the history is the mean over members, and not that of any of them
        parts = []
        for k in range(self.members):
            several = len(self.method.stages()) > 1
            left = {"left": of_member(k, fitted.left)} if several else {"state": index(fitted.state, k)}
            parts.append(self.method.posterior(model, run, alone._replace(**left)))
        return MixturePosterior.of(self, model, fitted, parts)


@dataclass(frozen=True)
class _Part(Ensemble):
    """Some neighbouring members of an ensemble, known by their numbers in it."""

    first: int = 0  # type: ignore[misc]

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        return Ensemble(self.method, self.members, self.init).posterior(model, run, fitted)


@dataclass(frozen=True)
class Stacked(Stage):
    """A stage of `members` members, numbered from `first`, stacked on the leading axis of its state.

    They differ in their starting point (`init`), the order of their batches and their noise.
    """

    stage: Stage
    members: int  # type: ignore[misc]
    init: Literal["fresh", "given", "prior"] = "fresh"
    first: int = 0

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.stage.traits

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.stage.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        return self.stage.prepare(model, run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        """The members' states, stacked; refused before anything is allocated where memory cannot hold them."""
        # a single state says how large all of them will be
        one = self.stage.start(model, run, key)
        held = num_bytes(one) + 3 * num_bytes(model.initial)
        require_memory(
            self.members * held,
            key.device,
            f"Ensemble of {self.members:,} members, each {held / 2**10:,.1f} KiB of weights, optimiser state and gradients",
        )
        self._warn_of_copies(model, run)
        # keys and starting points go by the number in the whole ensemble, whoever else runs here
        numbers = range(self.first, self.first + self.members)
        return stack([self.stage.start(self.starting(model, run, k), run, random.fold(key, k)) for k in numbers])

    def _warn_of_copies(self, model: Model, run: Run[Any]) -> None:
        if self.init == "fresh" and run.starts is None and (kept := model.not_reinitialisable()):
            log.warning(
                "these weights cannot be initialised anew by reset_parameters and start alike in all members: %s; "
                "init='prior' draws them from the prior",
                ", ".join(kept),
            )
        alike = run.starts is not None and len(next(iter(run.starts.values()))) == 1
        same = self.members > 1 and (alike or (self.init == "given" and run.starts is None))
        if same and not self.stage.traits.noisy and self.plan(model.num_data).batch_size is None:
            log.warning(
                "all members start alike and see the same full batches: unless the network itself is random they stay copies of "
                "each other and show no epistemic uncertainty; use init='fresh' or a batch_size"
            )

    def starting(self, model: Model, run: Run[Any], member: int) -> Model:
        """The model at this member's starting point."""
        if run.starts is not None:
            count = len(next(iter(run.starts.values())))
            return model.starting_at(index(run.starts, member % count))
        if self.init == "given":
            return model
        # by the member's number in the whole ensemble, whichever process it runs in
        stream = random.generator(run.seed, 5, member)
        fresh = model.reinitialised(stream) if self.init == "fresh" else model.prior.sample(model.initial, stream)
        return model.starting_at({**model.buffers, **fresh})

    def step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, Info]:
        """All members at once, by vmap; batches are stacked too unless all members see the whole data."""
        # members' own batches have one axis more
        shared = batch.y.ndim == model.target_ndim
        axes: Any = None if shared else Batch(*(None if part is None else 0 for part in batch))  # type: ignore[arg-type]
        advance = torch.func.vmap(lambda s, b: self.stage.step(model, run, s, b), in_dims=(0, axes), randomness="different")
        return advance(state, batch)

    def judged(self, model: Model, run: Run[Any], variables: Weights) -> Weights:
        return self.stage.judged(model, run, variables)

    def looped_step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, Info]:
        """All members one after the other: for networks that vmap cannot stack."""
        shared = batch.y.ndim == model.target_ndim
        results = [
            self.stage.step(model, run, index(state, k), batch if shared else index(batch, k)) for k in range(self.members)
        ]
        return stack([new for new, _ in results]), stack([info for _, info in results])

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        return concatenate([self.stage.kept(model, run, index(state, k)) for k in range(self.members)])


@dataclass(frozen=True)
class FirstOfSeveral(Stacked):
    """The stacked first stage of members that have more stages: it leaves what each of them goes on from."""

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        left: Weights = {}
        for k in range(self.members):
            left |= named(k, self.stage.kept(model, run, index(state, k)))
        return left


@dataclass(frozen=True)
class Member(Stage):
    """A later stage of one member (the `number`-th here, the `first` + `number`-th of the ensemble), on its own."""

    stage: Stage
    number: int
    first: int = 0

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.stage.traits

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.stage.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        return self.stage.prepare(model, self._run(run))

    def _run(self, run: Run[Any]) -> Run[Any]:
        return replace(run, before=of_member(self.number, run.before))

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        return self.stage.start(model, self._run(run), random.fold(key, self.first + self.number))

    def step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, Info]:
        return self.stage.step(model, self._run(run), state, batch)

    def judged(self, model: Model, run: Run[Any], variables: Weights) -> Weights:
        return self.stage.judged(model, self._run(run), variables)

    def finished(self, state: Any) -> bool:
        return self.stage.finished(state)

    def caption(self, state: Any) -> str | None:
        said = self.stage.caption(state)
        return said and f"member {self.first + self.number}, {said}"

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        others = {name: value for name, value in run.before.items() if not name.startswith(f"{self.number}/")}
        return others | named(self.number, self.stage.kept(model, self._run(run), state))


def named(member: int, left: Mapping[str, Tensor]) -> Weights:
    """What a member left, under names that begin with its number ("2/layer.weight"): all members leave their tensors together."""
    return {f"{member}/{name}": value for name, value in left.items()}


def of_member(member: int, left: Mapping[str, Tensor]) -> Weights:
    """The inverse of `named`: what this member left, among what all did."""
    return {n.partition("/")[2]: value for n, value in left.items() if n.partition("/")[0] == str(member)}
