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
from plausible.apps.report.findings import Effect, Output
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


def confusion(output: Output, most: int = 15) -> Shown | None:
    """How often each class was taken for each; None where there are too many classes to read."""
    count = len(output.classes)
    if count > most:
        return None
    y, answers = output.arrays["y"], output.arrays["probs"].argmax(-1)
    table = np.zeros((count, count), dtype=int)
    np.add.at(table, (y, answers), 1)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    names = [_short(name, 14) for name in output.classes]

    def draw(ax: Any) -> None:
        from matplotlib.patches import Rectangle  # of an extra

        # shares by opacity, which is right on light and on dark pages
        for row, column in np.ndindex(count, count):
            ink, share = "C0" if row == column else "C3", float(shares[row, column])
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=ink, alpha=0.7 * share, linewidth=0))
            if table[row, column]:
                ax.text(column, row, f"{table[row, column]:,}", ha="center", va="center", fontsize=12 if count <= 8 else 9)
        ax.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), xlabel="predicted", ylabel="true", aspect="equal")
        ax.set_xticks(range(count), names, rotation=0 if sum(map(len, names)) < 36 else 60)
        ax.set_yticks(range(count), names)
        ax.grid(False)

    wrong = [
        (int(table[a, b]), output.classes[a], output.classes[b]) for a, b in np.ndindex(count, count) if a != b and table[a, b]
    ]
    words = "; ".join(f"{n} of {a} taken for {b}" for n, a, b in sorted(wrong, reverse=True)[:6]) or "no answer was wrong"
    return shown(
        draw,
        "Confusion",
        f"confusion {output.name}",
        f"Confusion matrix of {output.name}: {words}.",
        "Held-out rows of each true class (one line) by the class that was predicted. Right answers stand on the diagonal.",
        heads=("true", *output.classes),
        rows=[(name, *(f"{n:,}" for n in row)) for name, row in zip(output.classes, table)],
        size=(4.7, 4.2),
    )


def importance(effects: Sequence[Effect], unit: str, most: int = 20) -> Shown:
    """Total effects of the columns as dots with bars over the draws, the largest on top."""
    some = effects[:most]
    low, mean, high = np.array([effect.arrays["importance"] for effect in some]).T

    def draw(ax: Any) -> None:
        places = np.arange(len(some))
        ax.hlines(places, low, high, color="C0", linewidth=2)
        ax.plot(mean, places, "o", color="C0", markersize=5)
        ax.set_yticks(places, [_short(effect.name, 40) for effect in some])
        ax.set(ylim=(len(some) - 0.5, -0.5), xlabel=f"total effect ({unit})")
        ax.set_xlim(0, float(high.max()) * 1.05 or 1.0)

    said = [(effect.name, number(m), f"{number(a)} to {number(b)}") for effect, a, m, b in zip(some, low, mean, high)]
    words = "; ".join(f"{name} {value}" for name, value, _ in said[:8])
    more = f" The first {most} of {len(effects)} columns." if len(effects) > most else ""
    return shown(
        draw,
        "Importance of columns",
        "importance",
        f"Total effects: {words}.",
        "How far predictions move, typically, when a training row gets the value of another in this column. Bars: nine tenths of "
        f"the draws.{more}",
        heads=("column", "total effect", "90 % of the draws"),
        rows=said,
        size=(7.5, 1.2 + 0.32 * len(some)),
    )


def effect(effect: Effect, names: Sequence[str], what: str, index: int) -> Shown:
    """Partial dependence on one column: a line and a band for each of the names, or points with bars for categories."""
    x, (low, mean, high) = effect.arrays["x"], effect.arrays["effect"]

    def draw(ax: Any) -> None:
        for k, name in enumerate(names):
            label = name if len(names) > 1 else None
            if effect.labels:
                places = np.arange(len(x)) + 0.12 * (k - (len(names) - 1) / 2)
                ax.vlines(places, low[k], high[k], color=f"C{k}", linewidth=2)
                ax.plot(places, mean[k], "o", color=f"C{k}", markersize=5, label=label)
            else:
                ax.fill_between(x, low[k], high[k], color=f"C{k}", alpha=0.2, linewidth=0)
                ax.plot(x, mean[k], color=f"C{k}", label=label)
        if effect.labels:
            upright = sum(map(len, effect.labels)) < 36
            ax.set_xticks(np.arange(len(x)), [_short(label, 14) for label in effect.labels], rotation=0 if upright else 60)
        else:
            ax.plot(x, np.full(len(x), 0.02), "|", color="0.5", transform=ax.get_xaxis_transform(), markersize=8)
        ax.set(xlabel=_short(effect.name), ylabel=_short(what))
        if effect.kind == "date":
            ax.ticklabel_format(axis="x", useOffset=False)
        if len(names) > 1:
            ax.legend()

    ends = [effect.labels[k] if effect.labels else number(float(x[k])) for k in (0, -1)]
    spoken = "; ".join(
        f"{name} from {number(float(mean[k].min()))} to {number(float(mean[k].max()))}" for k, name in enumerate(names)
    )
    return shown(
        draw,
        effect.name,
        f"effect {index}",
        f"Partial dependence on {effect.name}, {ends[0]} to {ends[1]}: {spoken}.",
        "The mean prediction for the training rows, were all of them to have this value. The band holds nine tenths of the draws."
        if index == 0
        else "",
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


def against_validation(history: Mapping[str, Sequence[float]], trained: int) -> Shown:
    """Log-likelihoods of a training row and of a row that training held out, over the epochs."""
    fitted = np.asarray(history["log_likelihood"], dtype=np.float64) / trained
    held = np.asarray(history["held_out_log_likelihood"], dtype=np.float64)
    best = int(np.nanargmax(held))
    late = np.concatenate([part[len(part) // 20 :] for part in (fitted, held)])  # a bad start would flatten the rest

    def draw(ax: Any) -> None:
        for values, name in ((fitted, "training rows"), (held, "rows held out while training")):
            some = thin(len(values), 400)
            ax.plot(some + 1, values[some], label=name)
        ax.axvline(best + 1, color="0.5", linewidth=1)
        ax.set(xlim=(1, len(held)), ylim=limits(late), xlabel="epoch", ylabel="log-likelihood per row")
        ax.legend()

    gap = number(float(fitted[best] - held[best]))
    return shown(
        draw,
        "Training against validation",
        "training validation",
        f"Log-likelihood per row over {len(held)} epochs: at epoch {best + 1}, the best, {number(float(fitted[best]))} on training "
        f"rows and {number(float(held[best]))} on rows held out while training.",
        f"The best epoch for rows that training did not see is {best + 1} (grey), with {number(float(held[best]))} nats a row; "
        f"training rows have {gap} more. A gap that widens is overfitting, which is why weights of the best epoch are kept.",
    )


def training(history: Mapping[str, Sequence[float]], trained: int | None = None, most: int = 6) -> list[Shown]:
    """A trace of each logged term over the epochs, or over the transitions of chains, warm-up among them."""
    figures = []
    if trained and len(history.get("held_out_log_likelihood", ())) > 1 and len(history.get("log_likelihood", ())) > 1:
        figures.append(against_validation(history, trained))
        history = {name: values for name, values in history.items() if "log_likelihood" not in name}
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
