"""Blundell, Cornebise, Kavukcuoglu, Wierstra (2015), Weight uncertainty in neural networks: MNIST, pruning, regression.

Their F_i sums over the batch and the rate multiplies that sum; a step here follows the bound divided by N. A rate r of theirs is
r·(batch size) here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments import curve, figures, mnist
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Results, Size, Values, look, number, paired
from experiments.mnist import Classifier, all_errors, final_error
from plausible.core.optimisers import SGD
from plausible.core.priors import Flat, Gaussian, ScaleMixture
from plausible.core.schedules import Cosine
from plausible.methods import MAP, MeanField

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 128
RATE = 1e-3 * BATCH
PRUNED = (0.0, 0.5, 0.75, 0.95, 0.98)

# The settings of the full cells, as in the paper where it states them. A rate r is stable in the narrow part of a mixture while
# r·(KL weight)/(N·sigma2²) < 2: with the paper's weights 2^{M−i} the first batch of an epoch has M/2 = 196 in the place of 1, so
# the KL is weighed evenly here. The rate of the Bayesian cells falls to 0, that of the others stays.
POINT = MAP(epochs=600, batch_size=BATCH, lr=RATE, optimiser=SGD(momentum=0.0))
BAYES = MeanField(
    epochs=600,
    batch_size=BATCH,
    lr=Cosine(RATE),
    optimiser=SGD(momentum=0.0),
    estimator="weights",
    samples=1,
    kl_weights="uniform",
    initial_scale=0.03,
)
# What the paper leaves open, by validation error in two looks of one seed each (docs/sweeps/). 20 epochs at 2×400, the 324
# settings of `plausible sweep blundell-2015`: the prior of the mixture, the best with one sample. 40 epochs at 2×1200, the
# settings of `sweeps/blundell-1200-*.toml`: both rates, scale and first scale of the Gaussian.
# The paper's largest rate is 0.128 here; three times that was better for both priors, but with the Gaussian one a seed diverged
# in its 22nd epoch, so it keeps 0.128. Not chosen: the mixture's first scale 0.02 is that of the 324 settings (the second look
# tried 0.01, 0.03, 0.06, 0.1; best 0.03), and a falling rate was never compared with a constant one.
CHOSEN_MIXTURE = {"rate": 0.384, "initial_scale": 0.02, "pi": 0.75, "sigma1": math.exp(-1), "sigma2": math.exp(-7)}
CHOSEN_GAUSSIAN = {"rate": 0.128, "initial_scale": 0.01, "scale": 0.3}
FULL = {
    "sgd": Classifier(POINT, units=0, every=20, prior=Flat()),
    "dropout": Classifier(POINT, units=0, every=20, prior=Flat(), hidden_dropout=0.5, input_dropout=0.2),
    "gaussian": Classifier(
        replace(BAYES, lr=Cosine(CHOSEN_GAUSSIAN["rate"]), initial_scale=CHOSEN_GAUSSIAN["initial_scale"]),
        units=0,
        every=20,
        prior=Gaussian(CHOSEN_GAUSSIAN["scale"]),
    ),
    "mixture": Classifier(
        replace(BAYES, lr=Cosine(CHOSEN_MIXTURE["rate"]), initial_scale=CHOSEN_MIXTURE["initial_scale"]),
        units=0,
        every=20,
        prune=PRUNED,
        prior=ScaleMixture(CHOSEN_MIXTURE["pi"], CHOSEN_MIXTURE["sigma1"], CHOSEN_MIXTURE["sigma2"]),
    ),
}
UNITS = (400, 800, 1200)

# Test errors of Table 1 in per cent, and the bars: the published number + 0.10, the Gaussian prior 1.80.
PUBLISHED = {
    "sgd": (1.83, 1.84, 1.88),
    "dropout": (1.51, 1.33, 1.36),
    "gaussian": (1.82, 1.99, 2.04),
    "mixture": (1.36, 1.34, 1.32),
}
BARS = {"sgd": (1.93, 1.94, 1.98), "dropout": (1.61, 1.43, 1.46), "gaussian": (1.80, 1.80, 1.80), "mixture": (1.46, 1.44, 1.40)}
WORDS = {"sgd": "SGD", "dropout": "SGD, dropout", "gaussian": "BBB, Gaussian", "mixture": "BBB, scale mixture"}
PRUNED_PUBLISHED = {"0": 1.24, "0.5": 1.24, "0.75": 1.24, "0.95": 1.29, "0.98": 1.39}
PRUNED_BARS = {"0.5": 0.05, "0.75": 0.05, "0.95": 0.10, "0.98": 0.25}
"""How many points the error may rise."""

# Reduced: 100 units in the place of 400, 5,000 images, 10 epochs of Adam, half the test images. Tiny: to see that everything runs.
SMALL_POINT = MAP(epochs=10, batch_size=BATCH, lr=Cosine(5e-3))
SMALL_BAYES = MeanField(epochs=10, batch_size=BATCH, lr=Cosine(5e-3), estimator="weights", initial_scale=0.01)
SMALL = {"units": 100, "train": 5_000, "validation": 2_000, "test": 5_000, "every": 5, "final_draws": 20}
TINY = {"units": 20, "train": 600, "validation": 200, "test": 200, "every": 1, "curve_draws": 2, "final_draws": 3}
REDUCED = {
    "sgd": Classifier(SMALL_POINT, units=0, prior=Flat()),
    "dropout": Classifier(SMALL_POINT, units=0, prior=Flat(), hidden_dropout=0.2),
    "gaussian": Classifier(SMALL_BAYES, units=0, prior=Gaussian(0.3)),
    "mixture": Classifier(SMALL_BAYES, units=0, prior=ScaleMixture(0.5, 0.5, 0.05), prune=PRUNED),
}
REDUCED_BARS = {"sgd": 8.5, "dropout": 8.5, "gaussian": 9.0, "mixture": 15.0}

CURVE = curve.Curve(
    bayes=MeanField(epochs=200, batch_size=100, lr=Cosine(2e-2), estimator="local", initial_scale=0.05),
    plain=MAP(epochs=200, batch_size=100, lr=Cosine(1e-2)),
    prior=Gaussian(3.0),
    units=50,
)
TINY_CURVE = replace(
    CURVE, bayes=replace(CURVE.bayes, epochs=3), plain=replace(CURVE.plain, epochs=3), units=10, rows=100, draws=5
)


def settings(kind: str, units: int) -> dict[Size, Classifier]:
    """The settings of a cell by size."""
    found: dict[Size, Classifier] = {"full": replace(FULL[kind], units=units)}
    if units == 400:
        small = REDUCED[kind]
        found["reduced"] = replace(small, **SMALL)  # type: ignore[arg-type]
        found["tiny"] = replace(small, method=replace(small.method, epochs=2), **TINY)  # type: ignore[arg-type,type-var]
    return found


CELLS = (
    *(Cell(f"{kind}-{units}", mnist.run, settings(kind, units)) for units in UNITS for kind in FULL),
    Cell("regression", curve.run, {"full": CURVE, "reduced": CURVE, "tiny": TINY_CURVE}),
)


def pruned(cell: str, fraction: str) -> Values:
    """Test errors after pruning by SNR."""
    return number(cell, "pruned", "snr", fraction)


def draw_curves(results: Results) -> Figure:
    """Figure 2: test error by epoch."""
    figure, ax = figures.new()
    figures.error_curves(ax, results, _labelled(results, FULL))
    return figure


def draw_weights(results: Results) -> Figure:
    """Figure 3: histograms of weights."""
    return figures.weight_histograms(results, _labelled(results, ("mixture", "dropout", "sgd")))


def draw_snr(results: Results) -> Figure:
    """Figure 4: density and distribution function of the signal-to-noise ratio."""
    return figures.snr(results, _labelled(results, ("mixture",)))


def _labelled(results: Results, kinds: Iterable[str]) -> dict[str, str]:
    """The widest cell of each kind, with its words."""
    found = {}
    for kind in kinds:
        own = [name for name in results if name.startswith(f"{kind}-")]
        if own:
            name = max(own, key=lambda name: int(name.partition("-")[2]))
            found[name] = f"{WORDS[kind]}, 2×{results[name]['settings']['units']}"
    return found


def draw_regression(results: Results) -> Figure:
    """Figure 5: the curve by both networks."""
    figure, axes = figures.new(1, 2, (10.0, 4.0), sharey=True)
    for ax, name, title in zip(axes, ("bayes", "plain"), ("Bayes by Backprop", "plain network")):
        if "regression" in results:
            figures.bands(ax, results["regression"], name, title)
    axes[0].legend(fontsize="small", loc="upper left")
    return figure


def width_order(cell: str, other: str) -> Values:
    """How much wider the weights of one cell scatter than those of another: one number."""

    def values(results: Results) -> Sequence[float] | None:
        first, second = look(results, cell, "weights", "std"), look(results, other, "weights", "std")
        return None if first is None or second is None else [first / second]

    return values


def one(cell: str, *path: str) -> Values:
    """A single number at this path."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, cell, *path)
        return None if found is None else [float(found)]

    return values


def rise(cell: str, fraction: str) -> Values:
    """Points by which pruning raises the error, seed by seed."""
    return paired(pruned(cell, fraction), pruned(cell, "0"))


def table_1(size: Size) -> list[Bound]:
    """Test errors of all cells."""
    if size == "full":
        return [
            Bound(f"{WORDS[kind]}, {units}", final_error(f"{kind}-{units}"), PUBLISHED[kind][k], high=BARS[kind][k], seeds=5)
            for kind in FULL
            for k, units in enumerate(UNITS)
        ]
    bars = REDUCED_BARS if size == "reduced" else dict.fromkeys(FULL, 100.0)
    return [Bound(WORDS[kind], final_error(f"{kind}-400"), PUBLISHED[kind][0], high=bars[kind]) for kind in FULL]


def table_2(size: Size) -> list[Bound]:
    """Errors and rises by fraction pruned."""
    cell = "mixture-1200" if size == "full" else "mixture-400"
    seeds = 5 if size == "full" else 1
    bars = PRUNED_BARS if size == "full" else {"0.5": 0.5, "0.75": 2.0} if size == "reduced" else {"0.5": 100.0}
    claims = [Bound(f"error, {100 * float(f):g} % removed", pruned(cell, f), value) for f, value in PRUNED_PUBLISHED.items()]
    return claims + [
        Bound(
            f"rise at {100 * float(f):g} %",
            rise(cell, f),
            round(PRUNED_PUBLISHED[f] - PRUNED_PUBLISHED["0"], 2),
            high=bar,
            seeds=seeds,
            unit="points",
        )
        for f, bar in bars.items()
    ]


def figure_weights(size: Size) -> list[Bound]:
    """The order of the widths in Figure 3."""
    units, low = (1200, 1.0) if size == "full" else (400, None)
    names = [f"{kind}-{units}" for kind in ("mixture", "dropout", "sgd")]
    return [
        Bound("s.d. of weights, BBB over dropout", width_order(names[0], names[1]), "> 1", low=low, unit=""),
        Bound("s.d. of weights, dropout over SGD", width_order(names[1], names[2]), "> 1", low=low, unit=""),
    ]


def figure_snr(size: Size) -> list[Bound]:
    """Figure 4 has two modes."""
    cell = "mixture-1200" if size == "full" else "mixture-400"
    return [Bound("modes of the density", one(cell, "snr", "peaks"), "2", low=2.0 if size == "full" else None, unit="")]


CURVE_CLAIMS = [
    Bound("band outside over inside, BBB", number("regression", "bayes", "opening"), "opens", low=3.0, unit="×"),
    Bound("band outside over inside, plain", number("regression", "plain", "opening"), "stays", high=1.1, unit="×"),
    Bound("RMSE of the median over the data, BBB", number("regression", "bayes", "rmse"), high=0.05, unit=""),
]


def by_size(kinds: Sequence[str], widths: Sequence[int]) -> dict[Size, list[str]]:
    """The cells of these kinds: of these widths in the full version, 400 units in the others."""
    small = [f"{kind}-400" for kind in kinds]
    return {"full": [f"{kind}-{units}" for units in widths for kind in kinds], "reduced": small, "tiny": small}


def claims(of: Callable[[Size], Sequence[Bound]]) -> dict[Size, Sequence[Bound]]:
    """The claims of each size."""
    return {size: of(size) for size in SIZES}


PARTS = (
    Part("table", "1", "Test errors on MNIST", by_size(tuple(FULL), UNITS), claims(table_1), all_errors),
    Part(
        "table", "2", "Pruning by signal-to-noise ratio at the end of training", by_size(["mixture"], [1200]), claims(table_2)
    ),
    Part("figure", "curves", "Test error by epoch (Figure 2)", by_size(tuple(FULL), [1200]), draw=draw_curves),
    Part(
        "figure",
        "weights",
        "Histogram of the weights (Figure 3)",
        by_size(["mixture", "dropout", "sgd"], [1200]),
        claims(figure_weights),
        draw=draw_weights,
    ),
    Part(
        "figure",
        "snr",
        "Density and distribution of the signal-to-noise ratio (Figure 4)",
        by_size(["mixture"], [1200]),
        claims(figure_snr),
        draw=draw_snr,
    ),
    Part(
        "figure",
        "regression",
        "The regression curve (Figure 5)",
        {size: ["regression"] for size in SIZES},
        {"full": CURVE_CLAIMS, "reduced": CURVE_CLAIMS, "tiny": CURVE_CLAIMS[1:2]},
        draw=draw_regression,
    ),
)

REPRODUCTIONS = {
    "blundell-2015": Reproduction(
        "blundell-2015",
        "Weight uncertainty in neural networks",
        "Weight Uncertainty in Neural Networks. Charles Blundell et al. ICML, 2015.",
        CELLS,
        PARTS,
        "blundell-2015",
    )
}
