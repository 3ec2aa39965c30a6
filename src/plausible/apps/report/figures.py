"""The figures of a report: each takes an `Output` or the history and gives what is shown, drawn, described and captioned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plausible.analysis import metrics
from plausible.analysis.metrics.detection import curve
from plausible.apps import plots
from plausible.apps.pages import Shown, percent_axes, shown
from plausible.apps.plots.chains import draw_convergence, draw_energies
from plausible.apps.plots.heldout import draw_pit, draw_predictions, draw_quantiles, draw_risk, draw_uncertainties
from plausible.apps.report.findings import Output
from plausible.apps.report.statistics import rank_shares, wilson
from plausible.apps.report.words import label, number, percent, plural
from plausible.blocks.chains import convergence as diagnostics
from plausible.posteriors.drawing import draw_band

CHAINS = 4  # drawn at most


def limits(*arrays: Iterable[float] | np.ndarray, margin: float = 0.04) -> tuple[float, float]:
    values = np.concatenate([np.asarray(array, dtype=np.float64).reshape(-1) for array in arrays])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    pad = margin * (high - low) or abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def thin(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced indices below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _short(text: str, length: int = 32) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def reliability(output: Output, bins: int = 10) -> Shown:
    """Share of right answers against stated confidence in bins of equal width, with 90 % Wilson intervals."""
    probs, y = output.arrays["probs"].astype(np.float64), output.arrays["y"]
    probs = probs / probs.sum(-1, keepdims=True)  # stored as float32

    def draw(ax: Any) -> None:
        plots.reliability(probs, y, bins, ax=ax)
        percent_axes(ax)

    points = []
    for said, share, count in zip(*metrics.reliability(probs, y, bins)):
        if count:
            low, high = wilson(float(share), int(count))
            interval = f"{percent(low)} to {percent(high)}"
            points.append((percent(float(said)), percent(float(share)), interval, f"{int(count):,}"))
    words = "; ".join(f"said {said}, right {share} of {count}" for said, share, _, count in points)
    return shown(
        draw,
        "Reliability",
        f"reliability {output.name}",
        f"Reliability diagram: {words}.",
        "Rows are grouped by the probability of the answer. Points below the dashed line claim too much, points above it too "
        "little; bars are what the number of rows leaves open.",
        heads=("stated", "right", "90 % interval", "rows"),
        rows=points,
    )


def pit(output: Output) -> Shown:
    """Histogram of u = F(y), with the range that holds 99 % of the counts of a right prediction in each bin."""
    values, bins = np.clip(output.arrays["pit"], 0, 1), 10 if output.count >= 50 else 5
    words = ", ".join(percent(count / output.count) for count in np.histogram(values, bins, (0, 1))[0])
    expected = f"in {bins} bins from 0 to 1, each {percent(1 / bins)} if calibrated"
    return shown(
        lambda ax: draw_pit(ax, values, bins).set_xlabel("predicted probability of a smaller value"),
        "Probability integral transform",
        f"pit {output.name}",
        f"Histogram of the probability integral transform {expected}: {words}.",
        "Flat if the predicted distributions are right. High at both ends: overconfident. High in the middle: underconfident. "
        "Slanted: biased.",
    )


def quantiles(output: Output) -> Shown:
    """The share of targets below each predicted quantile, with the pointwise 99 % range of chance."""
    values, levels = output.arrays["pit"], np.arange(21) / 20

    def draw(ax: Any) -> None:
        draw_quantiles(ax, values, levels, "held-out rows")
        percent_axes(ax)

    rows = [(percent(level), percent(float((values <= level).mean()))) for level in levels[[1, 2, 5, 10, 15, 18, 19]]]
    words = ", ".join(f"{below} below the {level} quantile" for level, below in rows)
    return shown(
        draw,
        "Calibration of quantiles",
        f"quantiles {output.name}",
        f"Calibration of quantiles: {words}.",
        "Of all targets, 10 % should lie below their predicted 10 % quantile, and so on: the dashed line.",
        heads=("quantile", "share below"),
        rows=rows,
    )


def predictions(output: Output, most: int = 250) -> Shown:
    """Truth against predicted mean with 90 % intervals."""
    some = thin(output.count, most)
    y, mean = output.arrays["y"][some], output.arrays["mean"][some]
    low, high = output.arrays["quantiles"][0][some], output.arrays["quantiles"][-1][some]
    outside = (y < low) | (y > high)
    ends = limits(y, mean)

    def draw(ax: Any) -> None:
        draw_predictions(ax, y, mean, low, high, 0.9)
        ax.set(xlim=ends, ylim=limits(y, np.clip(low, *ends), np.clip(high, *ends)), xlabel=_short(f"observed {output.name}"))

    correlation = float(np.corrcoef(y, mean)[0, 1]) if len(y) > 1 and y.std() and mean.std() else float("nan")
    counted = f"{len(some):,} of {output.count:,} rows" if len(some) < output.count else plural(output.count)
    return shown(
        draw,
        "Predictions and truth",
        f"predictions {output.name}",
        f"Predicted mean against observed {output.name} for {counted}: correlation {number(correlation, 2)}, "
        f"{percent(float(outside.mean()))} of the targets outside their 90 % interval.",
        f"{counted}. On the dashed line prediction and truth agree.",
    )


def risk(output: Output, most: int = 200) -> Shown:
    """Risk among the most certain rows, as a function of their share."""
    losses = output.losses.astype(np.float64)
    points = curve(torch.from_numpy(losses), torch.from_numpy(output.uncertainty.astype(np.float64)))
    share, values = (part.numpy() for part in points)
    best = np.sort(losses).cumsum() / np.arange(1, len(losses) + 1)
    what = "share wrong"
    if output.numeric:
        values, best, what = np.sqrt(values), np.sqrt(best), f"RMSE of {output.name}"
    some = thin(len(share), most)

    def draw(ax: Any) -> None:
        draw_risk(ax, share[some], values[some], _short(what))
        ax.plot(share[some], best[some], color="0.5", linewidth=1, label="at best")
        ax.set(xlabel="share of rows answered, most certain first")
        ax.set_ylim(0, float(max(values[some].max(), best.max())) * 1.08 or 1.0)
        percent_axes(ax, "x" if output.numeric else "xy")

    show = number if output.numeric else (lambda value: percent(value, 1))
    parts = [(percent(s), show(float(values[max(0, round(s * len(values)) - 1)]))) for s in (0.25, 0.5, 0.75, 1.0)]
    words = ", ".join(f"{value} for the most certain {share}" for share, value in parts)
    return shown(
        draw,
        "Risk and coverage",
        f"risk {output.name}",
        f"Risk-coverage curve: {what} {words}.",
        "What is left of the error if the least certain rows are handed to somebody else. The further below the dashed line, the "
        "more the uncertainty is worth.",
    )


def band(output: Output, xlabel: str) -> Shown:
    """Mean, 50 % and 90 % bands over the only input, with the data."""
    over = output.band
    grid, levels = over["x"], over["quantiles"]
    points = [output.arrays["y"], *([over["y_train"]] if "y_train" in over else [])]
    low, high = limits(levels[0], levels[-1], *points)
    reach = limits(*points, margin=1.0)  # bands that explode outside the data would flatten it

    def draw(ax: Any) -> None:
        draw_band(ax, grid, levels[[0, 1, 3, 4]], over["mean"])
        if "y_train" in over:
            ax.plot(over["x_train"], over["y_train"], "o", color="0.5", markersize=2.5, label="training rows")
        some = thin(output.count, 400)
        ax.plot(over["x_heldout"][some], output.arrays["y"][some], "o", color="0", markersize=3, label="held-out rows")
        ax.set(ylim=(max(low, reach[0]), min(high, reach[1])), xlabel=_short(xlabel), ylabel=_short(output.name))
        ax.legend()

    widths = levels[4] - levels[0]
    return shown(
        draw,
        "Predictive bands",
        f"band {output.name}",
        f"Predictive mean and bands of {output.name} over {xlabel}: the 90 % band is {number(float(widths.min()))} wide at its "
        f"narrowest and {number(float(widths.max()))} at {xlabel} = {number(float(grid[widths.argmax()]))}, its widest.",
        "Nine tenths of new rows should fall into the light band, half into the dark one. It should widen where there are no "
        "training rows.",
    )


def uncertainties(output: Output, xlabel: str) -> Shown:
    """Standard deviations of noise and of disagreement over the only input."""
    grid, inner, noise = (output.band["x"], np.sqrt(output.band["epistemic"]), np.sqrt(output.band["aleatoric"]))

    def draw(ax: Any) -> None:
        draw_uncertainties(ax, grid, inner, noise)
        ax.set(xlabel=_short(xlabel), ylabel=_short(f"standard deviation of {output.name}"))
        ax.legend()

    return shown(
        draw,
        "Where the uncertainty comes from",
        f"uncertainties {output.name}",
        f"Standard deviations over {xlabel}: epistemic from {number(float(inner.min()))} to {number(float(inner.max()))}, "
        f"noise from {number(float(noise.min()))} to {number(float(noise.max()))}.",
        "Epistemic is the disagreement of draws, which more data would remove; noise is what they would not.",
    )


def training(history: Mapping[str, Sequence[float]], most: int = 6) -> list[Shown]:
    """A trace of each logged term over the epochs, or over the transitions of chains, warm-up among them."""
    figures = []
    unit, mean = ("transition", "Mean over the chains") if "divergent" in history else ("epoch", "Mean of each epoch")
    for name, values in list(history.items())[:most]:
        array = np.asarray(values, dtype=np.float64)
        if len(array) < 2 or not np.isfinite(array).any():
            continue
        finite = array[np.isfinite(array)]
        low, high = limits(finite)
        early = float(np.quantile(finite, 0.1))
        if len(array) > 20 and high - early > 0 and (early - low) / (high - early) > 3:
            low = early - 0.2 * (high - early)  # a first epoch from a bad start would flatten all others

        def draw(ax: Any, array: np.ndarray = array, name: str = name, low: float = low, high: float = high) -> None:
            some = thin(len(array), 400)
            ax.plot(some + 1, array[some])
            ax.set(xlim=(1, len(array)), ylim=(low, high), xlabel=unit, ylabel=name.replace("_", " "))

        cut = " The beginning lies below the picture." if low > float(finite.min()) else ""
        scale = ", on the scale of the whole data" if name.startswith("log_") or unit == "epoch" else ""
        alt = f"{label(name)} over {len(array)} {unit}s, from {number(finite[0])} to {number(finite[-1])}."
        caption = f"{mean}{scale}: {number(finite[0])} at first, {number(finite[-1])} at last.{cut}"
        figures.append(shown(draw, name.replace("_", " "), f"training {name}", alt, caption))
    return figures


def chain_traces(traces: Mapping[str, np.ndarray]) -> list[Shown]:
    """Function values of each chain over its draws, at a few inputs."""
    values, figures = traces["values"], []
    for index in range(values.shape[2]):
        chains = values[:, :, index]

        def draw(ax: Any, chains: np.ndarray = chains) -> None:
            some = thin(chains.shape[1], 300)
            plots.chain_trace(chains[:CHAINS, some], ax=ax)
            for line in ax.get_lines():
                line.set_xdata(some + 1)
            ax.set(xlim=(1, max(2, chains.shape[1])), ylabel="network output")

        means = ", ".join(number(float(mean)) for mean in chains.mean(1))
        spread = ", ".join(number(float(spread)) for spread in chains.std(1))
        more = f" The first {CHAINS} of {len(chains)} chains." if len(chains) > CHAINS else ""
        alt = f"Traces of the network's output at an input: means of the chains {means}; spreads {spread}."
        caption = f"The first output at one input. Chains should look alike and wander around one level.{more}"
        figures.append(shown(draw, f"Trace {index + 1}", f"trace {index}", alt, caption, size=(4.7, 2.8)))
    return figures


def chain_ranks(traces: Mapping[str, np.ndarray]) -> Shown:
    """Histograms, one for each chain, of the ranks of its draws among those of all chains (Vehtari et al. 2021)."""
    shares = rank_shares(traces["values"])
    ranges = "; ".join(f"{number(float(row.min()), 2)} and {number(float(row.max()), 2)}" for row in shares)

    def draw(ax: Any) -> None:
        plots.rank_histogram(traces["values"], ax=ax)
        for patch in ax.patches[CHAINS:]:
            patch.remove()
        ax.legend()

    return shown(
        draw,
        "Ranks",
        "ranks",
        f"Rank histograms of the chains: between {ranges}; chains that agree are near 1.",
        "How the draws of each chain rank among those of all. Flat if chains agree; a chain that keeps to one side has not met the "
        "others.",
    )


def energies(traces: Mapping[str, np.ndarray]) -> Shown:
    """Energies around their mean and their changes in a transition, all chains together (Betancourt 2016)."""
    energy, change = traces["energy"], traces.get("energy_change")
    seen = [None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in (energy, change)]
    said = ", ".join(number(float(value), 2) for value in diagnostics.ebfmi(*seen).numpy())  # type: ignore[arg-type]
    around = number(float((energy - energy.mean(1, keepdims=True)).std()))
    changes = number(float((np.diff(energy, axis=1) if change is None else change).std()))
    return shown(
        lambda ax: draw_energies(ax, energy, change, 30).legend(),
        "Energies",
        "energies",
        f"Energies spread by {around} nats, their changes by {changes}.",
        f"Changes should be about as wide as the energies themselves; much narrower ones reach the tails slowly. E-BFMI of the "
        f"chains: {said}; below 0.3 is too small.",
    )


def convergence(traces: Mapping[str, np.ndarray]) -> Shown | None:
    """R̂ against effective sample size of each function value."""
    rhat, ess = traces["rhat"], traces["ess"]
    fine = np.isfinite(rhat) & np.isfinite(ess)
    rhat, ess = rhat[fine], ess[fine]
    if not len(rhat):
        return None
    return shown(
        lambda ax: draw_convergence(ax, rhat, ess),
        "Convergence",
        "convergence",
        f"R-hat of {len(rhat)} function values from {rhat.min():.3f} to {rhat.max():.3f}, effective draws from "
        f"{ess.min():.0f} to {ess.max():.0f}.",
        "Each point is one output at one input. Well mixed chains lie at the lower right: R̂ below 1.01, many effective draws.",
    )
