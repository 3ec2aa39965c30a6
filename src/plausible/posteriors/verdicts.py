"""Plain-language verdicts on chains: whether they agree, how many draws they are worth, what their transitions say, what to do.

Everything is said from the numbers of `posterior.diagnostics`, so that a report can say it again without the posterior. Limits are
those of Vehtari et al. (2021) for R̂ and effective sizes and of Betancourt (2016) for E-BFMI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from plausible.core.words import number, percent, plural
from plausible.posteriors.diagnostics import stored

RHAT, RHAT_BAD = 1.01, 1.05
ESS = 100
"""Effective draws per chain below which means and intervals are rough (Vehtari et al. 2021)."""
EBFMI = 0.3
FEW = 0.01
"""Share of transitions from which divergences are a warning and not a remark."""
SATURATED = 0.01
"""Share of trajectories that may be cut at the greatest depth before it is said."""
ORDER = {"bad": 0, "unclear": 1, "good": 2, "plain": 3}

Numbers = Mapping[str, Any]
"""What `posterior.diagnostics` says."""


class Verdict(NamedTuple):
    """`tone` is good, bad, unclear or plain; `headline` one sentence; `detail` and `advice` may be empty."""

    tone: str
    headline: str
    detail: str = ""
    advice: str = ""


def judged(numbers: Numbers, weights: Numbers | None = None, *, functions: bool = True) -> list[Verdict]:
    """Verdicts on `posterior.diagnostics(x)` of functions, with those of the weights beside them, or of weights alone.

    Agreement first, then what else is to be said, the worst first. Empty where there are too few draws to say anything.
    """
    # of weights that disagree, few effective draws say the same thing twice
    skipped = sizes if _apart(numbers) and not functions else None
    rest = [said for rule in RULES if rule is not skipped and (said := rule(numbers)) is not None]
    first = agreement(numbers, weights, functions)
    return [*([] if first is None else [first]), *sorted(rest, key=lambda verdict: ORDER[verdict.tone])]


def verdict(posterior: Any, x: Any = None) -> str:
    """The verdicts on a posterior as text, a line each: judged by f(x) at inputs `x`, or without them by the weights.

    With `x` weights are judged too: chains that agree on functions may have their hidden units in another order each.
    """
    weights = stored(posterior).diagnostics()
    numbers = weights if x is None else posterior.diagnostics(x)
    said = judged(numbers, None if x is None else weights, functions=x is not None)
    if "rhat" not in numbers and not said:
        each = len(posterior) // posterior.chains
        few = f"{plural(posterior.chains, 'chain')} with {plural(each, 'draw')} each"
        said.insert(0, Verdict("plain", f"Nothing can be said about convergence: {few}.", "At least 4 that differ are needed."))
    return text(said)


def text(said: list[Verdict]) -> str:
    """Verdicts as lines: what is so, why, what to do."""
    return "\n".join(" ".join(part for part in (one.headline, one.detail, one.advice) if part) for one in said)


def agreement(numbers: Numbers, weights: Numbers | None = None, functions: bool = True) -> Verdict | None:
    """Whether chains agree, by R̂: on functions, which is what predictions need, and on weights."""
    rhat, count = numbers.get("rhat"), numbers.get("chains") or 1
    if rhat is None:
        return None
    who = "The chains disagree" if count > 1 else "The chain has not settled: its first and second half disagree"
    value = number(float(rhat)) if math.isfinite(rhat) else "not finite"
    if not functions:
        return _of_weights(float(rhat), value, count, who)
    if not rhat <= RHAT_BAD:
        return Verdict("bad", f"{who}: the worst R̂ is {value}.", f"Above {RHAT_BAD} is a clear failure.", _longer(numbers))
    if rhat > RHAT:
        return Verdict("unclear", f"{who} a little: the worst R̂ is {rhat:.3f}.", f"Above {RHAT} look twice.", _longer(numbers))
    worth = _worth(numbers)
    detail = f"{worth[:1].upper()}{worth[1:]}." if worth else ""
    apart = weights.get("rhat") if weights else None
    if apart is not None and not apart <= RHAT_BAD and count > 1:
        many = f"R̂ {number(float(apart))}" if math.isfinite(apart) else "R̂ not finite"
        return Verdict(
            "good",
            f"The chains agree on functions: the worst R̂ of f(x) is {rhat:.3f}.",
            f"{detail} Weights do not agree between chains ({many}): hidden units are permuted, or trade places in other ways "
            "that f(x) does not see. That is fine for predictions; do not read single weights.".strip(),
        )
    return Verdict("good", f"The chains agree: the worst R̂ is {rhat:.3f}.", detail)


def _of_weights(rhat: float, value: str, count: int, who: str) -> Verdict:
    look = "Judge the functions, which is what predictions need: pass inputs x."
    if rhat <= RHAT:
        return Verdict("good", f"The weights of {plural(count, 'chain')} agree: the worst R̂ is {rhat:.3f}.")
    if count == 1:
        return Verdict("unclear", f"{who}: the worst R̂ of a weight is {value}.", "", look)
    return Verdict(
        "unclear",
        f"Weights do not{' fully' if rhat <= RHAT_BAD else ''} agree between chains: the worst R̂ is {value}.",
        "In a network this need not matter: chains may have their hidden units in another order each.",
        look,
    )


def _longer(numbers: Numbers) -> str:
    if "acceptance" not in numbers:  # chains of stochastic gradients
        return (
            "Run the chains longer, drop more as burn-in, or lower the step size; start several chains from different points "
            "to see whether they meet. Until then intervals are narrower than the posterior."
        )
    return (
        "Warm up longer (warmup) and draw more (draws, posterior.extend); if a chain sits in a mode of its own, try starting "
        "points from an earlier fit (init=), parallel-tempering, or more chains. Until then intervals may be narrower than the "
        "posterior."
    )


def _effective(numbers: Numbers) -> float | None:
    """The fewest effective draws, of the bulk or the tails."""
    known = [value for name in ("ess_bulk", "ess_tail") if (value := _number(numbers, name)) is not None]
    return min(known) if known else None


def _worth(numbers: Numbers) -> str:
    """How many draws there are in effect, and how well means are known."""
    size, error, draws = _effective(numbers), _number(numbers, "mcse"), numbers.get("draws")
    if size is None:
        return ""
    words = f"{size:,.0f} effective draws at least" + (f" of {draws:,}" if draws else "")
    return words + (f"; means are known to {percent(error, 1)} of a posterior standard deviation" if error else "")


def sizes(numbers: Numbers) -> Verdict | None:
    """Whether there are enough independent draws."""
    size, count, draws = _effective(numbers), numbers.get("chains") or 1, numbers.get("draws")
    if size is None or size >= ESS * count:
        return None
    advice = "Run longer, or thin less."
    if _apart(numbers):
        advice = "Chains that disagree have few: see to that first."
    elif "acceptance" in numbers and draws and size > 0:
        # effective draws grow with the length of the chains, rounded up to hundreds
        more = math.ceil((ESS * count / size - 1) * draws / count / 100) * 100
        slow = "; so many say that the sampler moves slowly: warm up longer, or try another metric"
        advice = (
            f"About {more:,} more of each chain would do, by posterior.extend(draws={more}) or a fit with "
            f"draws={more + draws // count}{slow if more > 10 * draws / count else ''}."
        )
    error = _number(numbers, "mcse")
    only = f"; means are known to {percent(error)} of a posterior standard deviation only" if error else ""
    return Verdict(
        "unclear",
        f"There are few independent draws: {size:.0f} of {f'{draws:,}' if draws else 'all'} in effect.",
        f"About {ESS} for each chain make means and 90 % intervals stable{only}.",
        advice,
    )


def divergences(numbers: Numbers) -> Verdict | None:
    """Transitions whose trajectory left the level of its energy."""
    count = int(numbers.get("divergences") or 0)
    if not count:
        return None
    target, every = _number(numbers, "target_acceptance"), numbers.get("transitions") or numbers.get("draws")
    every = every if "acceptance" in numbers else None
    advice = "Lower the step size: the sampler leaves out parts of the posterior that are narrow."
    if target is not None:
        advice = (
            f"Raise target_acceptance ({target:.3g} now, {1 - (1 - target) / 4:.3g} say), which shortens the steps; if some are "
            "left, change the posterior: standardise inputs and targets, fix a learned noise, or sample the scales of priors apart."
        )
    if not every:
        return Verdict("bad", f"{plural(count, 'transition')} diverged.", "", advice)
    return Verdict(
        "bad" if count >= FEW * every else "unclear",
        f"{plural(count, 'transition')} of {every:,} ({percent(count / every, 1)}) diverged.",
        "Steps were too long for narrow parts of the posterior, which may be missing from the draws.",
        advice,
    )


def energy(numbers: Numbers) -> Verdict | None:
    """E-BFMI: whether momenta move chains along the energies of the posterior."""
    value = _number(numbers, "ebfmi")
    if value is None or value >= EBFMI:
        return None
    return Verdict(
        "unclear",
        f"Energies are explored slowly: the smallest E-BFMI is {number(value, 2)}.",
        f"Below {EBFMI} chains are slow to reach the tails of the posterior, and intervals may be narrow.",
        "Warm up longer; use priors with lighter tails, or sample scales of priors apart from the weights.",
    )


def saturation(numbers: Numbers) -> Verdict | None:
    """Trajectories cut short at the greatest depth of the tree."""
    share, depth = _number(numbers, "saturated"), numbers.get("max_depth")
    if share is None or share <= SATURATED or depth is None:
        return None
    return Verdict(
        "unclear",
        f"{percent(share)} of the trajectories were cut at max_depth {depth} ({2 ** int(depth) - 1:,} leapfrogs).",
        "Draws are right, but closer to one another than they need be.",
        "Masses that fit the posterior make trajectories shorter: warm up longer, or metric='dense' or 'lowrank'; or raise "
        "max_depth.",
    )


def acceptance(numbers: Numbers) -> Verdict | None:
    """Acceptance far from what the step size was tuned for."""
    value, target = _number(numbers, "acceptance"), _number(numbers, "target_acceptance")
    if value is None or target is None:
        return None
    aimed = f"{percent(value)} of the proposals were accepted where {percent(target)} were aimed at"
    if value < 0.6 * target:
        why = "Steps are too long: chains stand still for long."
        advice = "Warm up longer, so that the step size is found, or give a smaller step_size."
        return Verdict("unclear", f"Only {aimed}.", why, advice)
    if value > 1 - (1 - target) / 4:
        short = "Steps are shorter than they need be, which costs time and nothing else; a longer warm-up may find longer ones."
        return Verdict("plain", f"{aimed}.", short)
    return None


def stuck(numbers: Numbers) -> Verdict | None:
    """A chain that hardly ever moves."""
    least, mean = _number(numbers, "acceptance_least"), _number(numbers, "acceptance")
    if least is None or mean is None or least >= 0.25 * mean or (numbers.get("chains") or 1) < 2:
        return None
    rest = f"it accepts {percent(least, 1)} of its proposals, all together {percent(mean)}"
    advice = "Warm up longer, or start the chains elsewhere (init='prior', or init= an earlier fit)."
    return Verdict("bad", f"One chain hardly moves: {rest}.", "Its draws repeat a few points.", advice)


def annealing(numbers: Numbers) -> Verdict | None:
    """Particles of an annealing run: how many they are worth, and how well the evidence is known."""
    effective, value, error = (_number(numbers, name) for name in ("effective", "log_evidence", "log_evidence_error"))
    if effective is None or value is None or error is None:
        return None
    worth = f"{plural(numbers.get('draws') or 0, 'particle')} are worth {effective:,.0f} independent ones at least"
    known = f"the log evidence is {number(value, 4)} ± {number(error, 2)}"
    advice = "Take more particles, smaller steps between temperatures, or more moves at each."
    if error >= 1:
        return Verdict("bad", f"The evidence is not known: {known}.", f"{worth}.", advice)
    return (
        Verdict("good", f"{worth}; {known}.") if effective >= ESS else Verdict("unclear", f"Only {worth}; {known}.", "", advice)
    )


def exchanges(numbers: Numbers) -> Verdict | None:
    """Replicas at powers of the likelihood: whether they travel."""
    rates, trips = numbers.get("swap_rates"), numbers.get("round_trips")
    if not rates or trips is None:
        return None
    least, total = min(map(float, rates)), sum(map(int, trips))
    said = f"{plural(total, 'round trip')} to the hottest power and back; neighbours exchange {percent(least)} of the time at least"
    if total and least >= 0.1:
        return Verdict("good", f"Replicas travel: {said}.")
    why = "Chains can then not hop between modes."
    return Verdict(
        "unclear", f"Replicas hardly travel: {said}.", why, "Use more temperatures, about twice the barrier, and draw more."
    )


def _apart(numbers: Numbers) -> bool:
    """Whether chains disagree, which also makes their effective sizes small."""
    return numbers.get("rhat") is not None and not numbers["rhat"] <= RHAT_BAD


def _number(numbers: Numbers, name: str) -> float | None:
    """What is known by this name, where it is a finite number."""
    value = numbers.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


RULES = (stuck, sizes, divergences, energy, saturation, acceptance, annealing, exchanges)

__all__ = ["EBFMI", "ESS", "RHAT", "RHAT_BAD", "Verdict", "judged", "text", "verdict"]
