"""Neal's examples and MacKay's robot arm by Hamiltonian Monte Carlo, with the precisions of the priors sampled along.

Neal's software (FBM) comes with three data sets, the networks and priors to try on them, and what came out: a curve with noise,
two classes, and three classes of which half of the inputs know nothing. Weights of a group are N(0, 1/τ), τ has a vague Gamma
prior; τ is drawn by Gibbs steps between trajectories (Neal 1996). Beside them the same networks by the Laplace approximation, whose
precisions are set by the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments import figures, mackay
from experiments.frame import (
    SIZES,
    Bound,
    Cell,
    Part,
    Reproduction,
    Request,
    Result,
    Results,
    Sheet,
    Size,
    Values,
    look,
    number,
)
from plausible.blocks.chains.convergence import ess, rhat
from plausible.core import random
from plausible.core.likelihoods import Bernoulli, Categorical, Likelihood
from plausible.core.likelihoods import Gaussian as Noise
from plausible.core.priors import FanIn, Gaussian, Hierarchical, Patterns, Prior
from plausible.fitting import fit
from plausible.methods import HMC

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VAGUE = Hierarchical.with_width(0.05, 0.5)
"""Neal's "0.05:0.5"."""
GRID = torch.linspace(-3.5, 3.5, 141)
"""Where the curve is drawn."""
SEEN = 50
"""Test inputs at which chains are compared."""
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Sampled:
    """A network with one layer of tanh units, raw inputs, and chains over all of its weights."""

    data: mackay.Table
    units: int
    prior: Prior
    method: HMC


def prior(*, inputs: bool = False, offset: float | None = 100.0) -> Prior:
    """Neal's: a precision for the weights into the hidden units, one for their biases, one for the weights out of them.

    The last shrinks with the number of units. With `inputs` there is one for each input; the bias of the outputs is N(0, offset²)
    or has a precision of its own. The logarithm of the noise is N(0, 3²), where Neal gives its precision a Gamma prior.
    """
    return Patterns(
        (
            ("likelihood.*", Gaussian(3.0)),
            ("2.weight", FanIn(VAGUE)),
            ("2.bias", VAGUE if offset is None else Gaussian(offset)),
            ("0.weight", replace(VAGUE, groups="input") if inputs else VAGUE),
            ("*", VAGUE),
        )
    )


def rows(name: mackay.Table) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Likelihood, int]:
    """Training and test rows as they are, in float32; the likelihood; how many outputs."""
    from plausible.apps.datasets import small

    table = small(name, dtype=torch.float32)
    train, test = table.splits[0]
    y = table.y
    likelihood: Likelihood = Categorical()
    outputs = int(y.max()) + 1 if y.dtype == torch.int64 else y.shape[1]
    if y.dtype != torch.int64:
        likelihood = Noise("learned")
    elif outputs == 2:
        likelihood, y, outputs = Bernoulli(), y[:, None].bool(), 1
    return (table.x[train], y[train]), (table.x[test], y[test]), likelihood, outputs


def run(settings: Sampled, request: Request) -> dict[str, Any]:
    """For each seed: errors on the test rows, of all chains and of the worst one; R̂ and effective draws of f(x)."""
    data, (x, y), likelihood, outputs = rows(settings.data)
    found: dict[str, Any] = {"scales": {}, "scale_rhat": {}}
    for seed in range(request.seed, request.seed + request.seeds):
        with random.isolated(seed):
            module = mackay.network((settings.units,), x.shape[1], outputs).float()
        posterior: Any = fit(
            module,
            data,
            settings.method,
            likelihood=likelihood,
            prior=settings.prior,
            seed=seed,
            device="cpu",
            progress=request.progress,
            checkpoint=None,
        )
        for name, value in measured(posterior, x, y).items():
            found.setdefault(name, []).append(value)
        for name, tau in posterior.precisions.items():
            scale = tau.rsqrt()
            found["scales"].setdefault(name, []).append(scale.flatten().quantile(torch.tensor(LEVELS).double()).tolist())
            found["scale_rhat"].setdefault(name, []).append(float(rhat(scale.log().unsqueeze(-1))))
        if settings.data == "neal_regression" and seed == request.seed:
            drawn = posterior.functions(GRID[:, None], None).flatten(1)
            found["curve"] = {"mean": drawn.mean(0).tolist(), "std": drawn.std(0).tolist()}
    return {**found, "weights": sum(p.numel() for p in module.parameters())}


def measured(posterior: Any, x: Tensor, y: Tensor) -> dict[str, float]:
    """What one run gave. `error` is the squared distance to the target, or the share of wrong classes in per cent."""
    chains, statistics = posterior.chains, posterior.statistics
    predictive = posterior.predict(x)
    f = posterior.functions(x, None)
    by_chain = f.reshape(-1, chains, *f.shape[1:]).transpose(0, 1)
    noise = posterior.weights(None).get("likelihood.log_scale")
    if y.dtype == torch.int64:
        outputs, wrong = by_chain.log_softmax(-1), 100 * (predictive.probs.argmax(-1) != y).double()
        alone = torch.stack([100 * (c.softmax(-1).mean(0).argmax(-1) != y).double().mean() for c in by_chain])
    elif y.dtype == torch.bool:
        outputs, wrong = by_chain, 100 * ((predictive.probs > 0.5) != y).double()
        alone = torch.stack([100 * ((c.sigmoid().mean(0) > 0.5) != y).double().mean() for c in by_chain])
    else:
        outputs, wrong = by_chain, (predictive.mean - y).square().sum(-1)
        alone = torch.stack([(c.mean(0) - y).square().sum(-1).mean() for c in by_chain])
    seen = outputs[:, :, :: max(1, len(x) // SEEN)].flatten(2)
    return {
        "error": float(wrong.mean()),
        "log_likelihood": float(predictive.log_prob(y).mean()),
        "worst_chain": float(alone.max()),
        "rhat": float(rhat(seen).max()),
        "ess": float(ess(seen).min()),
        "noise": float("nan") if noise is None else float(noise.exp().mean()),
        "acceptance": float(statistics["acceptance"].mean()),
        "divergences": float(statistics["divergent"].sum()),
        "gradients": float(statistics["leapfrogs"].sum()),
    }


def laplace(settings: mackay.Perceptron, request: Request) -> dict[str, Any]:
    """The network by the Laplace approximation, as in `mackay`; of several starts the one with the most evidence."""
    found = mackay.run(settings, replace(request, seeds=max(3, request.seeds)))
    best = mackay.best_start(found)
    own = {name: [value[best]] for name, value in found.items() if isinstance(value, list)}
    return {**own, "weights": found["weights"], "starts": len(found["error"])}


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

WORDS = {
    "regression": "curve, 8 units",
    "binary": "two classes, 15 units",
    "classes": "three classes, 8 units",
    "classes-ard": "three classes, 8 units, a precision for each input",
    "robot": "robot arm, 16 units",
    "robot-ard": "robot arm, 16 units, a precision for each input",
}


def times(cell: str, name: str, factor: float) -> Values:
    """The numbers of a cell times a factor."""

    def values(results: Results) -> Sequence[float] | None:
        found = number(cell, name)(results)
        return None if found is None else [factor * value for value in found]

    return values


def apart(results: Results) -> Sequence[float] | None:
    """Of inputs that carry nothing, the larger scale over the smaller one of inputs that do: medians of draws, by seed."""
    found = look(results, "classes-ard", "scales")
    if found is None:
        return None
    middle = LEVELS.index(0.5)
    each = [[row[middle] for row in found[f"0.weight[{i}]"]] for i in range(4)]
    return [max(c, d) / min(a, b) for a, b, c, d in zip(*each)]


def sheet(results: Results) -> list[Sheet]:
    """Each network by chains and by the Laplace approximation; then the chains and the scales that they found."""
    body, chains, scales = [], [], []
    for cell, words in WORDS.items():
        for name, method in ((cell, "HMC"), (f"{cell}-laplace", "Laplace")):
            if (row := results.get(name)) is not None:
                body.append((words, method, *(_shown(row, key) for key in ("error", "log_likelihood", "noise"))))
        if (row := results.get(cell)) is None:
            continue
        keys = ("worst_chain", "rhat", "ess", "acceptance", "divergences", "seconds")
        chains.append((words, *(_shown(row, key) for key in keys)))
        for group, values in row["scales"].items():
            low, _, middle, _, high = (f"{value:.3g}" for value in values[0])
            scales.append((words, group, middle, f"{low} to {high}", f"{row['scale_rhat'][group][0]:.2f}"))
    return [
        Sheet("On the test rows", ("network", "method", "error", "log-likelihood", "noise"), tuple(body)),
        Sheet(
            "Chains",
            (
                "network",
                "error of the worst chain alone",
                "worst R̂ of f(x)",
                "fewest effective draws",
                "acceptance",
                "divergences",
                "seconds",
            ),
            tuple(chains),
        ),
        Sheet("Scales 1/√τ, first run", ("network", "group", "median", "90 % of the draws", "R̂"), tuple(scales)),
    ]


def _shown(row: Result, key: str) -> str:
    found = [float(value) for value in (row[key] if isinstance(row[key], list) else [row[key]])]
    value = sum(found) / len(found)
    return "–" if math.isnan(value) else f"{value:.4g}".replace("-", "−")


def draw(results: Results) -> Figure:
    """The curve with two standard deviations of f, and the scales of the four inputs of the three classes."""
    figure, axes = figures.new(1, 2, (10.0, 3.8))
    curve = look(results, "regression", "curve")
    for ax, cell in zip(axes, ("regression", "classes-ard")):
        ax.set_visible(cell in results)
    if curve is not None:
        (x, y), _, _, _ = rows("neal_regression")
        middle, std = torch.tensor(curve["mean"]), torch.tensor(curve["std"])
        axes[0].plot(x.flatten(), y.flatten(), "x", color="0.4", markersize=3, label="100 rows")
        axes[0].fill_between(
            GRID, middle - 2 * std, middle + 2 * std, color="C0", alpha=0.25, linewidth=0, label="± 2 s.d. of f"
        )
        axes[0].plot(GRID, middle, color="C0", label="mean of f")
        truth = 0.3 + 0.4 * GRID + 0.5 * torch.sin(2.7 * GRID) + 1.1 / (1 + GRID**2)
        axes[0].plot(GRID, truth, color="black", linestyle="--", linewidth=1, label="truth")
        axes[0].set(xlabel="x", ylabel="y", ylim=(-2.5, 3.5), xlim=(-3.5, 3.5))
        axes[0].set_title("Neal's curve, 8 tanh units, HMC", fontsize="medium")
        axes[0].legend(fontsize="small")
    scales = look(results, "classes-ard", "scales")
    if scales is not None:
        for i in range(4):
            low, lower, middle, upper, high = scales[f"0.weight[{i}]"][0]
            colour = "C2" if i < 2 else "C3"
            axes[1].plot([i, i], [low, high], color=colour, linewidth=1.2)
            axes[1].plot([i, i], [lower, upper], color=colour, linewidth=5, alpha=0.5, solid_capstyle="butt")
            axes[1].plot([i], [middle], "o", color=colour)
        axes[1].set(yscale="log", ylabel="scale of the input's weights, 1/√τ")
        axes[1].set_xticks(range(4), ["x₁", "x₂", "x₃, carries nothing", "x₄, carries nothing"], fontsize="small")
        axes[1].set_title("three classes: 50 % and 90 % of the draws", fontsize="medium")
        axes[1].grid(axis="y", alpha=0.3)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells and claims

SHORT = HMC(draws=500, chains=4, warmup=1000, thin=8, leapfrogs=250, target_acceptance=0.9)
"""Many Gibbs steps between draws: the scales wander slowly where many weights share one."""
LONG = HMC(draws=600, chains=4, warmup=600, thin=3, leapfrogs=1000, target_acceptance=0.9)
"""For targets with little noise, whose posterior is a narrow bent ridge."""
MANY = HMC(draws=500, chains=8, warmup=1500, thin=6, leapfrogs=500, target_acceptance=0.9)
"""For a posterior with two modes, between which chains seldom pass."""
TINY = HMC(draws=6, chains=2, warmup=4, leapfrogs=3)
NETWORKS: dict[str, tuple[mackay.Table, int, Prior, HMC]] = {
    "regression": ("neal_regression", 8, prior(), MANY),
    "binary": ("neal_binary", 15, prior(), SHORT),
    "classes": ("neal_classes", 8, prior(offset=None), SHORT),
    "classes-ard": ("neal_classes", 8, prior(inputs=True, offset=None), SHORT),
    "robot": ("robot_arm", 16, prior(), LONG),
    "robot-ard": ("robot_arm", 16, prior(inputs=True), LONG),
}


def cells(names: Sequence[str]) -> list[Cell]:
    """By chains, and for each network once by the Laplace approximation."""
    found = []
    for name in names:
        data, units, own, method = NETWORKS[name]
        longer = replace(method, draws=4 * method.draws, warmup=2 * method.warmup)
        methods: dict[Size, HMC] = {"full": longer, "reduced": method, "tiny": TINY}
        found.append(Cell(name, run, {size: Sampled(data, units, own, methods[size]) for size in SIZES}))
        if not name.endswith("-ard"):
            nets = {size: mackay.Perceptron(data, (units,), mackay.METHODS[size]) for size in SIZES}
            found.append(Cell(f"{name}-laplace", laplace, nets))
    return found


def convergence(names: Sequence[str], few: bool) -> list[Bound]:
    """Chains agree about f(x); on the curve they cannot be expected to, since they stay in one of two modes for long."""
    found = []
    for name in names:
        high = None if few or name == "regression" else 1.05
        found.append(Bound(f"{WORDS[name]}: worst R̂ of f(x)", number(name, "rhat"), high=high, unit=""))
    return found


def neal_claims(size: Size) -> list[Bound]:
    """Beside what Neal's software gave on the same rows: from 900 iterations, in brackets from 9,900."""
    few = size == "tiny"

    def at(value: float) -> float | None:
        return None if few else value

    return [
        Bound(
            "curve: 1000 × squared error",
            times("regression", "error", 1e3),
            "10.33 ± 0.48 (16.63 ± 2.61)",
            high=at(16.7),
            unit="",
        ),
        Bound(
            "curve: log-likelihood of a test row",
            number("regression", "log_likelihood"),
            "0.854 ± 0.019 (0.839)",
            low=at(0.82),
            unit="nats",
        ),
        Bound("two classes: errors", number("binary", "error"), "10.40 ± 0.97 %", high=at(11.4)),
        Bound(
            "two classes: log-likelihood of a test row",
            number("binary", "log_likelihood"),
            "−0.237 ± 0.017",
            low=at(-0.25),
            unit="nats",
        ),
        Bound(
            "three classes, a precision for each input: errors", number("classes-ard", "error"), "19.80 ± 1.26 %", high=at(21.1)
        ),
        Bound(
            "three classes, a precision for each input: log-likelihood of a test row",
            number("classes-ard", "log_likelihood"),
            "−0.472 ± 0.023",
            low=at(-0.495),
            unit="nats",
        ),
        Bound(
            "three classes: scale of an input that carries nothing over that of one that does",
            apart,
            "much smaller",
            high=at(0.5),
            unit="×",
        ),
        *convergence(("regression", "binary", "classes", "classes-ard"), few),
    ]


def robot_claims(size: Size) -> list[Bound]:
    """Errors as Andrieu, de Freitas and Doucet (1999) quote them."""
    few = size == "tiny"
    return [
        Bound("1000 × test error by HMC", times("robot", "error", 1e3), 5.54, high=None if few else 5.9, unit=""),
        Bound(
            "1000 × test error by HMC, a precision for each input",
            times("robot-ard", "error", 1e3),
            5.49,
            high=None if few else 5.9,
            unit="",
        ),
        Bound("1000 × test error by the Laplace approximation", times("robot-laplace", "error", 1e3), 5.73, unit=""),
        Bound(
            "1000 × noise by HMC",
            times("robot", "noise", 1e3),
            "50, the truth",
            low=None if few else 47.0,
            high=None if few else 53.0,
            unit="",
        ),
        *convergence(("robot", "robot-ard"), few),
    ]


def build() -> dict[str, Reproduction]:
    """Neal's three examples, and the robot arm."""
    seeds: Mapping[Size, int] = {"full": 3, "reduced": 1, "tiny": 1}
    own, arm = cells(("regression", "binary", "classes", "classes-ard")), cells(("robot", "robot-ard"))
    every: dict[Size, Sequence[str]] = {size: [c.name for c in own] for size in SIZES}
    arms: dict[Size, Sequence[str]] = {size: [c.name for c in arm] for size in SIZES}
    neal = Reproduction(
        "neal-hmc",
        "Neal's examples by Hamiltonian Monte Carlo",
        "Software for flexible Bayesian modeling. Radford M. Neal, 1998 to 2022; Bayesian learning for neural networks. Radford M. "
        "Neal. Springer, 1996.",
        tuple(own),
        (
            Part("table", "1", "Neal's examples", every, {s: neal_claims(s) for s in SIZES}, sheet),
            Part("figure", "curve", "The curve, and the inputs of the three classes", every, draw=draw),
        ),
        "neal-hmc",
        seeds,
    )
    robot = Reproduction(
        "robot-arm-hmc",
        "MacKay's robot arm by Hamiltonian Monte Carlo",
        "Bayesian learning for neural networks. Radford M. Neal. Springer, 1996; Robust full Bayesian methods for neural networks. "
        "Christophe Andrieu, João F. G. de Freitas and Arnaud Doucet. NIPS, 1999.",
        tuple(arm),
        (Part("table", "1", "Robot arm", arms, {s: robot_claims(s) for s in SIZES}, sheet),),
        "neal-hmc",
        seeds,
    )
    return {"neal-hmc": neal, "robot-arm-hmc": robot}


REPRODUCTIONS = build()
