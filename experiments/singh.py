"""Singh's reproduction of Blundell et al. on MNIST: which of its findings hold, with the errors of its code and without.

Its settings are those of its code: batches of 100, two samples, SGD with rate 1e-3 on the sum over the batch (0.1 here), μ uniform
in [−0.2, 0.2], ρ uniform in [−5, −4]. `singh-faithful` has its errors too: log q counts the second layer twice and the third not
at all, and images are classified by the geometric mean of ten networks and the network at the posterior mean. Its pruning
started from the epoch of lowest validation error; here it starts from the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from experiments import figures, mnist
from experiments.frame import SIZES, Bound, Cell, Effect, Part, Reproduction, Results, Size, Values, look, number, paired
from experiments.mnist import Classifier, all_errors, final_error
from plausible.blocks.variational import entropy
from plausible.core import random
from plausible.core.optimisers import SGD
from plausible.core.priors import Gaussian, ScaleMixture
from plausible.core.serialise import register
from plausible.core.weights import Weights, select
from plausible.methods import MeanField
from plausible.methods.variational.bound import RHO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plausible.core.model import Model
    from plausible.engine.method import Run


@register(name="reproductions.Backprop")  # the name in the stored results
@dataclass(frozen=True)
class Backprop(MeanField):
    """E_q log p(D | w) + E_q log p(w) + Σ_l counts_l·H(q_l): the evidence bound where every layer counts once.

    Means start uniform in ±`mean_range`, ρ between the two of `rho_range`, for weights and biases alike. Counts (1, 2, 0) are
    those of Singh's code: the scales of the last layer have then no entropy to hold them up.
    """

    mean_range: float = 0.2
    rho_range: tuple[float, float] = (-5.0, -4.0)
    counts: tuple[float, ...] = (1.0, 1.0, 1.0)

    def parameters(self, model: Model, run: Run[Any], key: Tensor) -> Weights:
        """Uniform means and ρ."""
        like = select(model.initial, model.random)
        first, second = (random.uniform(random.fold(key, 31 + k), 0, like) for k in range(2))
        low, high = self.rho_range
        means = {name: self.mean_range * (2 * value - 1) for name, value in first.items()}
        rhos = {RHO + name: low + (high - low) * value for name, value in second.items()}
        return {**super().parameters(model, run, key), **means, **rhos}

    def _closed(self, model: Model, means: Weights, scales: Weights) -> tuple[Tensor, tuple[str, ...]]:
        kl, rest = super()._closed(model, means, scales)
        for count, names in zip(self.counts, layers(scales)):
            if count != 1:
                kl = kl + (1 - count) * entropy({name: scales[name] for name in names})
        return kl, rest


def layers(named: Mapping[str, Any]) -> list[list[str]]:
    """The names of weights by the module they belong to, in order."""
    found: dict[str, list[str]] = {}
    for name in named:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


BATCH = 100
METHOD = Backprop(
    epochs=600,
    batch_size=BATCH,
    lr=1e-3 * BATCH,
    optimiser=SGD(momentum=0.0),
    samples=2,
    estimator="weights",
    kl_weights="blundell",
)
PRUNED = (0.0, 0.25, 0.5, 0.75, 0.95)
BASE = Classifier(METHOD, units=400, prior=ScaleMixture(0.5, 1.0, math.exp(-6)))
SETTINGS = {
    "mixture": replace(BASE, prune=PRUNED, prune_by=("magnitude", "snr")),
    "mixture-narrow": replace(BASE, prior=ScaleMixture(0.5, 1.0, math.exp(-8))),
    "mixture-quarter": replace(BASE, prior=ScaleMixture(0.25, 1.0, math.exp(-6))),
    "gaussian": replace(BASE, prior=Gaussian(1.0)),
    "uniform": replace(BASE, method=replace(METHOD, kl_weights="uniform")),
    "unit": replace(BASE, normalisation="unit"),
    "standard": replace(BASE, normalisation="standard"),
}
WORDS = {
    "mixture": "mixture (½, 1, e⁻⁶)",
    "mixture-narrow": "mixture (½, 1, e⁻⁸)",
    "mixture-quarter": "mixture (¼, 1, e⁻⁶)",
    "gaussian": "Gaussian, σ = 1",
    "uniform": "mixture, KL not reweighted",
    "unit": "mixture, pixels in [0, 1]",
    "standard": "mixture, pixels standardised",
}
# Reduced: 100 units, 3,000 images, 10 epochs. Tiny: to see that everything runs.
SMALLER: dict[Size, tuple[int, dict[str, int]]] = {
    "full": (600, {}),
    "reduced": (10, {"units": 100, "train": 3_000, "validation": 1_000, "test": 3_000, "every": 5, "final_draws": 10}),
    "tiny": (2, {"units": 10, "train": 500, "validation": 100, "test": 200, "every": 1, "curve_draws": 2, "final_draws": 3}),
}

# Published: test errors in per cent, differences in points, and the pruning table by |μ| and by |μ|/σ.
GAUSSIAN, MIXTURE = 1.69, 2.03
NAIVE = {"0": 2.03, "0.25": 2.41, "0.5": 5.33, "0.75": 30.67, "0.95": 63.11}
BY_SNR = {"0": 2.03, "0.25": 2.59, "0.5": 5.89, "0.75": 41.05, "0.95": 82.50}
EPOCHS_PER_HOUR = 75
BARS = {"gaussian": 1.80, "mixture": 2.10}
REDUCED_BARS = {"gaussian": 16.0, "mixture": 16.0}


def cell(name: str, settings: Classifier, faithful: bool) -> Cell:
    """The cell by size."""
    found: dict[Size, Classifier] = {}
    for size, (epochs, changes) in SMALLER.items():
        counts = (1.0, 2.0, 0.0) if faithful else (1.0, 1.0, 1.0)
        method = replace(settings.method, epochs=epochs, counts=counts)  # type: ignore[type-var]
        draws = {"final_draws": settings.curve_draws} if faithful and size == "full" else {}
        found[size] = replace(settings, method=method, geometric=faithful, **{**changes, **draws})  # type: ignore[arg-type]
    return Cell(name, mnist.run, found)


def less(first: str, second: str) -> Values:
    """Test error of one cell less that of another, seed by seed."""
    return paired(final_error(first), final_error(second))


def pruning(fraction: str) -> Values:
    """Error after naive pruning less that after pruning by SNR, seed by seed."""
    return paired(number("mixture", "pruned", "magnitude", fraction), number("mixture", "pruned", "snr", fraction))


def centre(results: Results) -> Sequence[float] | None:
    """Density of the weights around 0, mixture over Gaussian."""
    found = [look(results, name, "weights", "shares") for name in ("mixture", "gaussian")]
    if None in found:
        return None
    middle = [sum(shares[len(shares) // 2 - 1 : len(shares) // 2 + 1]) for shares in found]
    return [middle[0] / max(middle[1], 1e-9)]


def speed(results: Results) -> Sequence[float] | None:
    """Epochs an hour of one network, tests included, all seeds together."""
    result = results.get("mixture")
    if result is None:
        return None
    return [3600 * result["curve"]["epoch"][-1] * result["seeds"] / result["training_seconds"]]


def findings(size: Size) -> list[Bound | Effect]:
    """What the study says, beside what comes out."""
    bars, seeds = (BARS, 5) if size == "full" else (REDUCED_BARS, 1)
    rates = [
        Bound("test error, Gaussian prior", final_error("gaussian"), GAUSSIAN, high=bars["gaussian"], seeds=seeds),
        Bound("test error, mixture prior", final_error("mixture"), MIXTURE, high=bars["mixture"], seeds=seeds),
    ]
    effects = [
        Effect("KL reweighting lowers the error", less("mixture", "uniform"), -1, -0.3),
        *(
            Effect(f"the Gaussian prior beats the {WORDS[name]}", less("gaussian", name), -1, published)
            for name, published in (("mixture", GAUSSIAN - MIXTURE), ("mixture-narrow", "< 0"), ("mixture-quarter", "< 0"))
        ),
        Effect("dividing by 126 beats pixels in [0, 1]", less("mixture", "unit"), -1, "−0.1 to −0.2"),
        Effect("dividing by 126 beats standardising", less("mixture", "standard"), -1, "−0.1 to −0.2"),
        *(
            Effect(f"naive pruning beats SNR at {100 * float(f):g} %", pruning(f), -1, round(NAIVE[f] - BY_SNR[f], 2))
            for f in ("0.25", "0.5", "0.75", "0.95")
        ),
    ]
    spiked = Bound("density of weights at 0, mixture over Gaussian", centre, "spiked, bimodal", unit="×")
    fast = Bound("epochs an hour of one network", speed, EPOCHS_PER_HOUR, low=7500.0, unit="")
    return [*rates, *effects, spiked, *([fast] if size == "full" else [])]


def table_1(size: Size) -> list[Bound]:
    """Errors after pruning."""
    high = 100.0 if size == "tiny" else None
    return [
        Bound(f"{100 * float(f):g} % removed by {words}", number("mixture", "pruned", by, f), published[f], high=high)
        for f in NAIVE
        for by, words, published in (("magnitude", "|μ|", NAIVE), ("snr", "|μ|/σ", BY_SNR))
    ]


def draw_curves(results: Results) -> Figure:
    """Figure 1a: test error by epoch."""
    figure, axes = figures.new(1, 2, (11.0, 4.2))
    priors = ("gaussian", "mixture", "mixture-narrow", "mixture-quarter")
    figures.error_curves(axes[0], results, {name: WORDS[name] for name in priors})
    figures.error_curves(axes[1], results, {name: WORDS[name] for name in ("mixture", "uniform", "unit", "standard")})
    return figure


def draw_weights(results: Results) -> Figure:
    """Figures 1b and 1c: the weights under both priors."""
    return figures.weight_histograms(results, {name: WORDS[name] for name in ("mixture", "gaussian")})


def draw_snr(results: Results) -> Figure:
    """Figure 2: signal-to-noise ratios with the cuts."""
    return figures.snr(results, {name: WORDS[name] for name in ("mixture", "gaussian")})


def build(name: str, faithful: bool) -> Reproduction:
    """With or without the errors of the original code."""

    def cells(*names: str) -> dict[Size, Sequence[str]]:
        return dict.fromkeys(SIZES, names)

    parts = (
        Part("table", "findings", "The study's findings", cells(*SETTINGS), {s: findings(s) for s in SIZES}, all_errors),
        Part("table", "1", "Pruning (Table 1)", cells("mixture"), {size: table_1(size) for size in SIZES}),
        Part("figure", "curves", "Test error by epoch (Figure 1a)", cells(*SETTINGS), draw=draw_curves),
        Part("figure", "weights", "The weights (Figures 1b, 1c)", cells("mixture", "gaussian"), draw=draw_weights),
        Part("figure", "snr", "Signal-to-noise ratios (Figure 2)", cells("mixture", "gaussian"), draw=draw_snr),
    )
    made = tuple(cell(own, settings, faithful) for own, settings in SETTINGS.items())
    title = f"A study of Bayes by Backprop, {'with the errors of its code' if faithful else 'correct'}"
    return Reproduction(name, title, "Bayesian Neural Networks. Aaditya Singh.", made, parts, "singh")


REPRODUCTIONS = {"singh": build("singh", False), "singh-faithful": build("singh-faithful", True)}
