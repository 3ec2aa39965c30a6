"""What methods share that carry particles from the prior to the posterior through powers of the likelihood: SMC and AIS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, ModelDensity
from plausible.blocks.chains.gibbs import sample_given
from plausible.blocks.chains.tempering import Place, effective, hamiltonian, log_mean, relative_variance, systematic
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Traits
from plausible.methods.chains.base import check_counts, check_function, check_memory, fastest
from plausible.posteriors.chains import ParticlesPosterior

TRACED = ("temperature", "ess", "acceptance", "step_size", "leapfrogs", "error")
"""What is noted of each temperature; `error` is the relative standard error of the evidence so far."""
CARE = 1.0
"""How far the logarithm of the step size follows the acceptance after each move."""


class AnnealedState(NamedTuple):
    """All particles, then all pilots, on the leading axis `[rows, …]`, at the power `beta`.

    `log_weights` and `ancestors` are of the particles alone; `log_evidence` sums what resampling took out of the weights. `trace`
    has a row for each temperature and the columns `TRACED`; `passed` says how many there have been.
    """

    position: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    log_weights: Tensor
    ancestors: Tensor
    log_evidence: Tensor
    beta: Tensor
    step_size: Tensor
    inverse_mass: Tensor
    trace: Tensor
    key: Tensor
    passed: Tensor


@dataclass(frozen=True)
class Annealed(Method):
    """w ~ p(w) → p(D | w)^β p(w) → p(w | D)

    The base of methods that anneal particles from the prior.

    At each power β the `particles` are weighted by what the likelihood gained, perhaps resampled, and moved `moves` times by
    Hamiltonian trajectories of length `trajectory` (in standard deviations of the cloud, at most `leapfrogs` steps). Step sizes
    aim at `target_acceptance`. They, the masses and the powers are learned from `pilots`, a second cloud that is no part of the
    result, so that the law of a particle's path does not depend on the particles: exp(log_evidence) is then unbiased. Without
    pilots they are learned from the particles, which leaves a bias of the order 1/particles.
    """

    particles: int = 512
    moves: int = 5
    pilots: int = 128
    trajectory: float = 1.5
    leapfrogs: int = 16
    target_acceptance: float = 0.8

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False, noisy=True, mixed_precision=False)
    traced: ClassVar[tuple[str, ...]] = TRACED

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_counts(self, particles=2, moves=1, pilots=0, leapfrogs=1)
        if self.pilots == 1:
            raise ValueError(f"{who}: pilots must be 0 or at least 2, since a spread is taken over them, got 1")
        if not (math.isfinite(self.trajectory) and self.trajectory > 0):
            raise ValueError(f"{who}: trajectory must be positive and finite, got {self.trajectory!r}")
        if not 0 < self.target_acceptance < 1:
            raise ValueError(f"{who}: target_acceptance must be in (0, 1), got {self.target_acceptance!r}")

    @property
    def longest(self) -> int:
        """The most temperatures there can be."""
        raise NotImplementedError

    def next_beta(self, beta: float, count: int, log_likelihood: Tensor) -> float:
        """The next power, from the current one, the number of temperatures so far and the guides' log-likelihoods."""
        raise NotImplementedError

    def resamples(self, share: float, beta: float) -> bool:
        """Whether particles are resampled when this share of them is effective."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        return self.particles + self.pilots

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return Plan(steps=self.longest, per_epoch=1, batch_size=None, unit="temperatures")

    def prepare(self, model: Model, run: Run[Any]) -> ModelDensity:
        who = type(self).__name__
        # an improper prior has no draws, and no normalising constant from which to count
        if improper := [name for name in model.random if not model.prior.rule(name).proper]:
            raise ValueError(
                f"{who}: prior of {', '.join(improper)} is improper, so that it has no draws to start from and no evidence; choose "
                "a proper one, such as priors.Gaussian(scale=1.0)"
            )
        if run.starts is not None:
            raise ValueError(f"{who}: init= is of no use, particles start at draws from the prior; leave it out")
        if not isinstance(model.temperature, Tensor) and model.temperature != 1.0:
            raise ValueError(
                f"{who}: the model must have temperature 1, whose prior can be drawn from, got {model.temperature}"
            )
        return fastest(ModelDensity(model, run.data, self.rows), run, self.longest * self.moves * self.leapfrogs)

    def start(self, model: Model, run: Run[ModelDensity], key: Tensor) -> AnnealedState:
        target = run.prepared
        check_memory(self, target, "particles")
        stream, like = random.generator(run.seed, 6), {name: model.initial[name] for name in model.random}
        # particles are drawn given the weights that do not move, where the prior ties them to the others
        if not model.points or model.prior.independent:
            drawn = model.prior.sample(like, stream, self.rows)
        else:
            try:
                drawn = sample_given(model.prior, model.initial, tuple(like), stream, self.rows)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}: {error}") from None
        return self.started(target, target.flatten(drawn), key)

    def started(self, target: Density, position: Tensor, key: Tensor) -> AnnealedState:
        """The state at draws `[rows, P]` from the prior, at β = 0."""
        likelihood, prior = target.densities(position)
        if not bool(torch.isfinite(likelihood[: self.particles]).any()):
            raise ValueError(
                f"{type(self).__name__}: the likelihood is 0 at all draws from the prior: standardise inputs and targets, or "
                "choose a narrower prior"
            )
        check_function(type(self).__name__, target, position, likelihood)
        zero = torch.zeros((), dtype=torch.float64, device=key.device)
        return AnnealedState(
            position=position,
            log_likelihood=_sure(likelihood),
            log_prior=prior,
            log_weights=zero.expand(self.particles).clone(),
            ancestors=torch.arange(self.particles, device=key.device),
            log_evidence=zero.clone(),
            beta=zero.clone(),
            step_size=zero + min(self.trajectory, position.shape[-1] ** -0.25),
            inverse_mass=position.double().var(0),
            trace=zero.expand(self.longest, len(TRACED)).clone(),
            key=key,
            passed=torch.zeros_like(zero, dtype=torch.int64),
        )

    def step(self, model: Model, run: Run[ModelDensity], state: AnnealedState, batch: Batch) -> tuple[AnnealedState, Info]:
        return self.advanced(run.prepared, state)

    def advanced(self, target: Density, state: AnnealedState) -> tuple[AnnealedState, Info]:
        """The next temperature over any target."""
        if not self.finished(state):  # else nothing, so that results do not depend on when the end is noticed
            state = self._moved(target, *self._weighted(state))
        row = state.trace[int(state.passed) - 1]
        # pilots are no part of what is said
        likelihood = state.log_likelihood[: self.particles]
        seen = likelihood[torch.isfinite(likelihood)]
        return state, {**dict(zip(TRACED, row)), "log_likelihood": seen.mean() if len(seen) else row.new_zeros(())}

    def _weighted(self, state: AnnealedState) -> tuple[AnnealedState, Tensor]:
        """The state at the next power, reweighted and where it is time resampled, and its row of the trace, half filled."""
        count, particles = int(state.passed), self.particles
        guides = state.log_likelihood[particles:] if self.pilots else state.log_likelihood
        beta = self.next_beta(float(state.beta), count, guides)
        gained = (beta - state.beta) * state.log_likelihood
        weights = state.log_weights + gained[:particles]
        share, error = effective(weights) / particles, relative_variance(weights, state.ancestors) ** 0.5
        # the next temperature would be built on no particle at all
        if share == 0:
            raise ArithmeticError(
                f"{type(self).__name__}: all weights vanished at β = {beta:.3g}: take more temperatures, or more particles"
            )
        # both are drawn, used or not: noise is a function of the number of the temperature alone
        offsets = random.uniform(random.fold(state.key, 0), count, state.trace.new_empty(2))
        rows = torch.arange(self.rows, device=state.key.device)
        evidence = state.log_evidence
        if self.resamples(share, beta):
            # what resampling takes out of the weights is kept in the evidence
            rows[:particles] = systematic(weights, offsets[0])
            evidence, weights = evidence + log_mean(weights), torch.zeros_like(weights)
        if self.pilots:
            rows[particles:] = particles + systematic(gained[particles:], offsets[1])
        note = state.trace.new_tensor([beta, share * particles, 0.0, 0.0, 0.0, error])
        return state._replace(
            position=state.position[rows],
            log_likelihood=state.log_likelihood[rows],
            log_prior=state.log_prior[rows],
            log_weights=weights,
            ancestors=state.ancestors[rows[:particles]],
            log_evidence=evidence,
            beta=torch.full_like(state.beta, beta),
            passed=state.passed + 1,
        ), note

    def _moved(self, target: Density, state: AnnealedState, note: Tensor) -> AnnealedState:
        count = int(state.passed)
        guides = slice(self.particles, None) if self.pilots else slice(None)
        spread = state.position[guides].double().var(0)
        # a direction in which the cloud has collapsed would freeze: scales fall by a factor of 100 a temperature at most
        mass = torch.where(torch.isfinite(spread), spread.clamp(min=1e-4 * state.inverse_mass), state.inverse_mass)
        inverse_mass = mass.to(target.dtype)
        bound = target.bound(beta=state.beta.expand(self.rows).clone())
        # the power has changed, and with it the gradient
        likelihood, prior, gradient = bound.evaluate(state.position)
        place = Place(state.position, _sure(likelihood), prior, gradient)
        size, accepted, steps = state.step_size, note.new_zeros(()), 0
        for move in range(self.moves):
            # one length for all rows, which move together
            length = max(1, min(self.leapfrogs, round(self.trajectory / float(size))))
            keys = [random.fold(state.key, 1 + stream) for stream in range(3)]
            counter = count * self.moves + move
            # steps of random length keep trajectories from closing on themselves
            jitter = random.uniform(keys[2], counter, state.log_likelihood)
            moved = hamiltonian(
                bound,
                place,
                random.normal(keys[0], counter, place.position),
                random.uniform(keys[1], counter, place.log_likelihood),
                size * (0.6 + 0.8 * jitter),
                inverse_mass,
                length,
            )
            place = moved.place
            # by the guides alone: the law of a particle's path must not depend on the particles
            size = size * (CARE * (moved.acceptance[guides].mean() - self.target_acceptance)).exp()
            size = size.clamp(max=self.trajectory)
            accepted, steps = accepted + moved.acceptance[: self.particles].mean() / self.moves, steps + length
        trace, none = state.trace.clone(), accepted.new_zeros(())
        trace[count - 1] = note + torch.stack([none, none, accepted, size, accepted.new_tensor(steps), none])
        return state._replace(
            position=place.position,
            log_likelihood=place.log_likelihood,
            log_prior=place.log_prior,
            step_size=size,
            inverse_mass=mass,
            trace=trace,
        )

    def finished(self, state: AnnealedState) -> bool:
        return float(state.beta) >= 1

    def kept(self, model: Model, run: Run[ModelDensity], state: AnnealedState) -> Weights:
        """As many draws as particles, equally weighted: resampled by what weights there are."""
        target = run.prepared
        # a stream of its own: asking twice gives the same draws
        offset = float(torch.rand((), generator=random.generator(run.seed, 8), dtype=torch.float32))
        rest = {name: value.expand(self.particles, *value.shape) for name, value in target.rest.items()}
        return {**rest, **target.named(state.position[systematic(state.log_weights, offset)])}

    def caption(self, state: AnnealedState) -> str:
        beta, ess, acceptance, *_ = state.trace[int(state.passed) - 1].tolist()
        return f"β {beta:.3g}, {ess:,.0f} of {self.particles:,} effective, acceptance {acceptance:.2f}"

    def evidence(self, state: AnnealedState) -> tuple[float, float]:
        """Log p(D) and its standard error, once the posterior is reached; NaN before."""
        if not self.finished(state):
            return math.nan, math.nan
        value = float(state.log_evidence + log_mean(state.log_weights))
        return value, float(state.trace[int(state.passed) - 1, TRACED.index("error")])

    def posterior(self, model: Model, run: Run[ModelDensity], fitted: Fitted) -> ParticlesPosterior:
        if fitted.interrupted and not self.finished(fitted.state):
            raise KeyboardInterrupt(
                f"stopped at β = {float(fitted.state.beta):.3g}, before the posterior was reached: there are no draws of it; with "
                "checkpoint= a run goes on where it stopped"
            )
        return ParticlesPosterior.of(self, model, fitted)


def anneal(method: Annealed, target: Density, position: Tensor, seed: int = 0) -> AnnealedState:
    """The last state of a run over any density from draws `[rows, P]` of its prior: for targets that are no networks."""
    with torch.no_grad(), random.isolated(seed, position.device):
        state = method.started(target, position, random.key(seed, device=position.device))
        while not method.finished(state):
            state, _ = method.advanced(target, state)
    return state


def _sure(log_likelihood: Tensor) -> Tensor:
    """The log-likelihood with −∞ for NaN: a likelihood that cannot be computed counts as 0."""
    return log_likelihood.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
