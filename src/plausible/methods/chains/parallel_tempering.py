"""Parallel tempering: each chain has replicas at powers of the likelihood, which exchange their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.adaptation import DualAveraging, Slopes, first_step, moments_for, windows
from plausible.blocks.chains.density import Density, Evaluation, ModelDensity
from plausible.blocks.chains.integrators import Diagonal
from plausible.blocks.chains.tempering import Bridges, Place, bridged, hamiltonian, ladder, no_bridges, respaced
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.engine.method import Fitted, Info, Run
from plausible.methods.chains.base import STATISTICS, Chains, ChainState, check_counts
from plausible.posteriors.chains import ReplicasPosterior

BLOCKS = 8
"""Stretches of the run that give the standard error of the evidence, of each chain."""
MOMENTUM, LEVEL, JITTER, SWAP, FIRST = range(5)
"""Streams of noise."""


class Replicas(NamedTuple):
    """What is learned of each of K powers, from the coldest to the hottest, and what exchanges did since the warm-up.

    `betas`, `step_size` `[K]`; `inverse_mass` `[K, P]`; `window` moments of all rows; `accepted` `[K − 1]` sums of the acceptance
    probabilities of exchanges over `seen` transitions. `replica` `[K, chains]` says which one stands where, `been_hot`
    `[K, chains]` (by replica) whether it was at the hottest power since it was last at the coldest, `round_trips` `[chains]`
    counts returns.
    """

    betas: Tensor
    step_size: Tensor
    averaging: DualAveraging
    inverse_mass: Tensor
    window: Any
    accepted: Tensor
    seen: Tensor
    replica: Tensor
    been_hot: Tensor
    round_trips: Tensor
    bridges: Bridges


@register
@dataclass(frozen=True)
class ParallelTempering(Chains):
    """exchange w_j and w_k with probability min{1, exp((β_j − β_k)(log p(D | w_k) − log p(D | w_j)))}   (Geyer 1991)

    Parallel tempering: replicas of each chain at powers of the likelihood, flat ones to travel and the posterior to keep.

    Each chain has `temperatures` replicas at 1 = β_1 > … > β_K = `hottest` (0: the prior itself). A transition moves all of
    them by a trajectory of length `trajectory` (in standard deviations, at most `leapfrogs` steps), then offers exchanges to
    even and odd pairs in turn, so that a replica travels on in one direction (Syed et al. 2021). The warm-up learns masses,
    step sizes and powers of equal rates of exchange. With `hottest=0`, `log_evidence` is estimated by bridges. Cost: (1 +
    leapfrogs) gradients of all rows a transition.
    """

    temperatures: int = 8
    hottest: float = 0.0
    trajectory: float = 1.5
    leapfrogs: int = 32
    target_acceptance: float = 0.8

    name: ClassVar[str] = "parallel-tempering"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, temperatures=2, leapfrogs=1)
        if not 0 <= self.hottest < 1:
            raise ValueError(f"ParallelTempering: hottest is the smallest power, in [0, 1), got {self.hottest!r}")
        if not (math.isfinite(self.trajectory) and self.trajectory > 0):
            raise ValueError(f"ParallelTempering: trajectory must be positive and finite, got {self.trajectory!r}")
        if not 0 < self.target_acceptance < 1:
            raise ValueError(f"ParallelTempering: target_acceptance must be in (0, 1), got {self.target_acceptance!r}")

    @property
    def rows(self) -> int:
        """Replicas of all chains, those at the posterior first: row k · chains + c is that of chain c at the k-th power."""
        return self.chains * self.temperatures

    def prepare(self, model: Model, run: Run[Any]) -> ModelDensity:
        improper = [name for name in model.random if not model.prior.rule(name).proper]
        if improper and self.hottest == 0:
            raise ValueError(
                f"ParallelTempering: prior of {', '.join(improper)} is improper, so that no replica can stand at β = 0; choose a "
                "proper one, or hottest=0.01, say"
            )
        return super().prepare(model, run)

    def bind(self, target: Density, state: ChainState) -> Density:
        betas = state.adaptation.betas if state.adaptation else self._first_betas(state.position.device)
        return target.bound(beta=betas.repeat_interleave(self.chains))

    def _first_betas(self, device: torch.device) -> Tensor:
        rise = ladder(self.temperatures - 1).flip(0).to(device)
        return self.hottest + (1 - self.hottest) * rise

    def begin(self, target: Density, state: ChainState) -> ChainState:
        rungs, chains, device = self.temperatures, self.chains, state.position.device
        unit = Diagonal(torch.ones(target.size, dtype=target.dtype, device=device))
        noise, start = state.normal(FIRST, state.position), torch.full_like(state.log_prior, target.size**-0.25)
        step = first_step(target, unit, state.position, state.evaluation, noise, start).reshape(rungs, chains).median(1).values
        zero = torch.zeros((), dtype=torch.float64, device=device)
        order = torch.arange(rungs, device=device).unsqueeze(1).expand(rungs, chains)
        replicas = Replicas(
            self._first_betas(device),
            step,
            DualAveraging.begin(step),
            unit.inverse_mass.expand(rungs, -1).clone(),
            moments_for("diag", state.position, slopes="pooled"),
            zero.expand(rungs - 1).clone(),
            zero.clone(),
            order.clone(),
            order == rungs - 1,
            zero.expand(chains).clone(),
            no_bridges(BLOCKS, rungs, chains, device),
        )
        return state._replace(adaptation=replicas, statistics=state.no_statistics("swap"))

    def transition(self, target: Density, state: ChainState) -> ChainState:
        learnt: Replicas = state.adaptation
        # all rows move in step: as many leapfrogs as the shortest step needs, and longer steps shortened to match
        count = max(1, min(self.leapfrogs, round(self.trajectory / float(learnt.step_size.min()))))
        size = learnt.step_size.clamp(max=self.trajectory / count)  # [K]
        jitter = 0.8 + 0.4 * state.uniform(JITTER, state.log_prior)
        step = size.repeat_interleave(self.chains) * jitter
        moved = hamiltonian(
            target,
            Place(state.position, *state.evaluation),
            state.normal(MOMENTUM, state.position),
            state.uniform(LEVEL, state.log_prior),
            step,
            learnt.inverse_mass.repeat_interleave(self.chains, 0),
            count,
        )
        levels = state.uniform(SWAP, state.log_prior)
        place, accepted, order = self.exchanged(moved.place, learnt.betas, levels, int(state.step))
        swap = order != torch.arange(len(order), device=order.device)
        before, number = learnt.betas, int(state.step)
        learnt = self._travelled(learnt._replace(accepted=learnt.accepted + accepted, seen=learnt.seen + 1), order)
        if number < self.warmup:
            rate = moved.acceptance.reshape(self.temperatures, -1).mean(1)
            learnt = self._learned(target, state, learnt, moved.place, rate, size)
        else:
            # draws of one stretch depend on each other, so that the standard error is taken over stretches
            block = min(BLOCKS - 1, (number - self.warmup) * BLOCKS // (self.draws * self.thin))
            likelihood = place.log_likelihood.reshape(self.temperatures, -1)
            learnt = learnt._replace(bridges=bridged(learnt.bridges, block, learnt.betas, likelihood))
        cost = torch.full_like(step, count + 1)
        statistics = dict(zip(STATISTICS, (moved.acceptance, moved.divergent, step, cost, moved.energy)))
        new = state._replace(**place._asdict(), adaptation=learnt, statistics={**statistics, "swap": swap.double()})
        if bool(swap.any()) or learnt.betas is not before:  # powers are others now, and so are gradients
            new = new._replace(gradient=self.bind(target, new).evaluate(new.position).gradient)
        return new

    def exchanged(self, place: Place, betas: Tensor, levels: Tensor, number: int) -> tuple[Place, Tensor, Tensor]:
        """Neighbours exchanged: pairs (1, 2), (3, 4), … after even transitions, (2, 3), … after odd ones.

        `levels` `[rows]` ~ U(0, 1). Returns the places (with gradients still those of other powers), the acceptance probabilities
        `[K − 1]` of all pairs, averaged over chains, and from which row each row's place came `[rows]`.
        """
        rungs = self.temperatures
        likelihood = place.log_likelihood.reshape(rungs, -1)
        ratio = (betas[:-1] - betas[1:]).unsqueeze(1) * (likelihood[1:] - likelihood[:-1])  # [K − 1, chains]
        offered = torch.arange(rungs - 1, device=betas.device).unsqueeze(1) % 2 == number % 2
        # all pairs are judged, also those that are not offered: their rates say how to space the powers
        taken = offered & (levels.reshape(rungs, -1)[:-1].log() < ratio)
        # pairs do not overlap, so that all exchanges of a transition are one permutation
        source = torch.arange(rungs, device=betas.device).unsqueeze(1).expand_as(likelihood).clone()
        source[:-1] += taken.long()
        source[1:] -= taken.long()
        rows = (source * self.chains + torch.arange(self.chains, device=betas.device)).reshape(-1)
        return Place(*(part[rows] for part in place)), ratio.clamp(max=0).exp().mean(1), rows

    def _travelled(self, learnt: Replicas, order: Tensor) -> Replicas:
        """Who stands where, and how often one came back from the hottest power to the posterior."""
        source = order.reshape(self.temperatures, -1) // self.chains
        replica = learnt.replica.gather(0, source)
        # a replica has made a round trip when it is back at the posterior after the hottest power
        been_hot = learnt.been_hot.scatter(0, replica[-1:], True)
        back = been_hot.gather(0, replica[:1])
        return learnt._replace(
            replica=replica, been_hot=been_hot.scatter(0, replica[:1], False), round_trips=learnt.round_trips + back.squeeze(0)
        )

    def _learned(
        self, target: Density, state: ChainState, learnt: Replicas, place: Place, acceptance: Tensor, used: Tensor
    ) -> Replicas:
        """After a transition of the warm-up: step sizes, and at the ends of windows masses and powers.

        `place` is where rows were before they were exchanged, with gradients of their own powers.
        """
        learnt = learnt._replace(averaging=learnt.averaging.update(acceptance, self.target_acceptance))
        number, (first, ends) = int(state.step), windows(self.warmup)
        if ends and first <= number <= ends[-1]:
            window: Slopes = learnt.window.add(place.position, place.gradient)
            learnt = learnt._replace(window=window)
            if number in ends:
                mass = window.inverse_mass(self.temperatures, learnt.inverse_mass.dtype)
                # new masses measure lengths otherwise than the ones before: steps are sought anew
                metric = Diagonal(mass.repeat_interleave(self.chains, 0))
                start = torch.minimum(learnt.averaging.final, used).repeat_interleave(self.chains)
                noise = state.normal(FIRST, place.position)
                each = first_step(target, metric, place.position, Evaluation(*place[1:]), noise, start)
                step = each.reshape(self.temperatures, self.chains).median(1).values
                learnt = learnt._replace(
                    inverse_mass=mass,
                    betas=respaced(learnt.betas, 1 - learnt.accepted / learnt.seen),
                    averaging=DualAveraging.begin(step),
                    window=moments_for("diag", place.position, slopes="pooled"),
                    accepted=torch.zeros_like(learnt.accepted),
                    seen=torch.zeros_like(learnt.seen),
                )
        # what the warm-up counted is forgotten: powers were others then
        last = number == self.warmup - 1
        step = learnt.averaging.final if last else learnt.averaging.step
        learnt = learnt._replace(step_size=step.clamp(max=self.trajectory))
        if last:
            learnt = learnt._replace(
                accepted=torch.zeros_like(learnt.accepted),
                seen=torch.zeros_like(learnt.seen),
                round_trips=torch.zeros_like(learnt.round_trips),
            )
        return learnt

    def advanced(self, target: Density, state: ChainState) -> tuple[ChainState, Info]:
        """One transition; what is said of it is about the chains at the posterior."""
        new, info = super().advanced(target, state)
        return new, {name: value[: self.chains] for name, value in info.items()}

    def caption(self, state: ChainState) -> str:
        learnt, cold = state.adaptation, slice(self.chains)
        # R̂ and acceptance are those of the chains that are kept
        seen = state._replace(
            running=state.running._replace(mean=state.running.mean[cold], squares=state.running.squares[cold]),
            statistics={name: value[cold] for name, value in state.statistics.items()},
        )
        rate = float((learnt.accepted / learnt.seen.clamp(min=1)).min())
        return f"{super().caption(seen)}, exchanges {rate:.2f}"

    def posterior(self, model: Model, run: Run[ModelDensity], fitted: Fitted) -> ReplicasPosterior:
        return ReplicasPosterior.of(self, model, run, fitted, chains=self.chains)

    @classmethod
    def conforming(cls) -> ParallelTempering:
        return cls(draws=15, warmup=40, chains=96, temperatures=4, trajectory=1.0, leapfrogs=5)
