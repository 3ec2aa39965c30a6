"""The figures of a report: each takes an `Output` or the history and gives a `<figure>`, drawn, described and captioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from plausible.analysis import metrics
from plausible.analysis.metrics.selective import curve
from plausible.apps.report.statistics import count_range, rank_shares, wilson
from plausible.apps.report.stored import Output
from plausible.apps.report.svg import Chart, limits, thin, tick_text
from plausible.apps.report.words import escape, label, number, percent, plural, table
from plausible.blocks.chains import convergence as diagnostics

SERIES = ("main", "second", "third", "fourth")
_TENTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def figure(picture: str, name: str, caption: str, numbers: str = "", kind: str = "") -> str:
    """A figure with its caption, and the numbers behind it where they are given."""
    hidden = f"<details><summary>Numbers of “{escape(name)}”</summary>{numbers}</details>" if numbers else ""
    opened = f'<figure class="{kind}">' if kind else "<figure>"
    return f"{opened}{picture}<figcaption><b>{escape(name)}.</b> {escape(caption)}{hidden}</figcaption></figure>"


def shares(values: Sequence[float]) -> list[str]:
    """Tick labels of shares."""
    return [f"{100 * value:.0f} %" for value in values]


def reliability(output: Output, bins: int = 10) -> str:
    """Share of right answers against stated confidence in bins of equal width, with 90 % Wilson intervals."""
    probs = output.arrays["probs"].astype(np.float64)
    found = metrics.reliability(probs / probs.sum(-1, keepdims=True), output.arrays["y"], bins)
    points = [
        (float(said), float(share), *wilson(float(share), int(count)), int(count))
        for said, share, count in zip(*found)
        if count
    ]
    chart = Chart(
        (0, 1), (0, 1.02), "stated probability of the answer", "share right", xticks=_TENTHS, yticks=_TENTHS, texts=shares
    )
    chart.line((0, 1), (0, 1), "dash", "as stated")
    said, share, low, high, _ = map(list, zip(*points))
    chart.sticks(said, low, high, "range", "90 % interval").dots(said, share, "main", 4.5, "held-out rows")
    words = "; ".join(f"said {percent(a)}, right {percent(b)} of {n}" for a, b, _, _, n in points)
    rows = [(percent(a), percent(b), f"{percent(c)} to {percent(d)}", f"{n:,}") for a, b, c, d, n in points]
    numbers = table(
        f"Reliability of {output.name}", ("stated", "right", "90 % interval", "rows"), rows, kind="small", hidden=True
    )
    return figure(
        chart.svg(f"Reliability diagram: {words}."),
        "Reliability",
        "Rows are grouped by the probability of the answer. Points below the dashed line claim too much, points above it too "
        "little; bars are what the number of rows leaves open.",
        numbers,
    )


def pit(output: Output, bins: int = 10) -> str:
    """Histogram of u = F(y), with the range that holds 99 % of the counts of a right prediction in each bin."""
    values, count = output.arrays["pit"], output.count
    bins = bins if count >= 50 else 5
    counts, edges = np.histogram(np.clip(values, 0, 1), bins, (0, 1))
    low, high = (bound / count * bins for bound in count_range(count, 1 / bins))
    heights = counts / count * bins
    top = 1.1 * max(float(heights.max()), high)
    chart = Chart((0, 1), (0, top), "predicted probability of a smaller value", "density", xticks=_TENTHS)
    chart.bars(edges, heights, "inner", "held-out rows").line((0, 1), (1, 1), "ink thin", "calibrated")
    chart.line((0, 1), (low, low), "dash", "99 % range of chance").line((0, 1), (high, high), "dash")
    words = ", ".join(percent(c / count) for c in counts)
    return figure(
        chart.svg(
            f"Histogram of the probability integral transform in {bins} bins from 0 to 1, each {percent(1 / bins)} if calibrated: "
            f"{words}."
        ),
        "Probability integral transform",
        "Flat if the predicted distributions are right. High at both ends: overconfident. High in the middle: underconfident. "
        "Slanted: biased.",
    )


def quantiles(output: Output) -> str:
    """The share of targets below each predicted quantile, with the pointwise 99 % range of chance."""
    values, count = np.sort(output.arrays["pit"]), output.count
    levels = np.arange(0, 1.0001, 0.05)
    found = np.searchsorted(values, levels, side="right") / count
    ranges = [(0, 0), *(count_range(count, float(level)) for level in levels[1:-1]), (count, count)]
    low, high = (np.array(bound) / count for bound in zip(*ranges))
    chart = Chart((0, 1), (0, 1), "predicted quantile", "share of targets below", xticks=_TENTHS, yticks=_TENTHS, texts=shares)
    chart.area(levels, low, high, "chance", "99 % range of chance").line((0, 1), (0, 1), "dash")
    chart.line(levels, found, "main", "held-out rows")
    rows = [(percent(levels[i]), percent(found[i])) for i in (1, 2, 5, 10, 15, 18, 19)]
    words = ", ".join(f"{below} below the {level} quantile" for level, below in rows)
    return figure(
        chart.svg(f"Calibration of quantiles: {words}."),
        "Calibration of quantiles",
        "Of all targets, 10 % should lie below their predicted 10 % quantile, and so on: the dashed line.",
        table(f"Targets below quantiles of {output.name}", ("quantile", "share below"), rows, kind="small", hidden=True),
    )


def predictions(output: Output, most: int = 250) -> str:
    """Truth against predicted mean with 90 % intervals."""
    some = thin(output.count, most)
    y, mean = output.arrays["y"][some], output.arrays["mean"][some]
    low, high = output.arrays["quantiles"][0][some], output.arrays["quantiles"][-1][some]
    outside = (y < low) | (y > high)
    ends = limits(y, mean)
    chart = Chart(ends, limits(y, np.clip(low, *ends), np.clip(high, *ends)), f"observed {output.name}", "predicted")
    chart.line(ends, ends, "dash").sticks(y, low, high, "range thin", "90 % interval")
    chart.dots(y[~outside], mean[~outside], "main", 2, "inside").dots(y[outside], mean[outside], "wrong", 2.5, "outside")
    correlation = float(np.corrcoef(y, mean)[0, 1]) if len(y) > 1 and y.std() and mean.std() else float("nan")
    shown = f"{len(some):,} of {output.count:,} rows" if len(some) < output.count else plural(output.count)
    return figure(
        chart.svg(
            f"Predicted mean against observed {output.name} for {shown}: correlation {number(correlation, 2)}, "
            f"{percent(float(outside.mean()))} of the targets outside their 90 % interval."
        ),
        "Predictions and truth",
        f"{shown}. On the dashed line prediction and truth agree.",
    )


def risk(output: Output, most: int = 200) -> str:
    """Risk among the most certain rows, as a function of their share."""
    losses, uncertainty = output.losses, output.uncertainty
    found = curve(torch.from_numpy(losses.astype(np.float64)), torch.from_numpy(uncertainty.astype(np.float64)))
    best = np.sort(losses).cumsum() / np.arange(1, len(losses) + 1)
    share, values = found.coverage.numpy(), found.risk.numpy()
    if output.numeric:
        values, best, what = np.sqrt(values), np.sqrt(best), f"RMSE of {output.name}"
    else:
        what = "share wrong"
    some = thin(len(share), most)
    top = float(max(values[some].max(), best.max())) * 1.08 or 1.0
    chart = Chart(
        (0, 1),
        (0, top),
        "share of rows answered, most certain first",
        what,
        xticks=_TENTHS,
        texts=lambda v: shares(v) if tuple(v) == _TENTHS or (not output.numeric and top > 0.05) else tick_text(v),
    )
    chart.line((0, 1), (values[-1], values[-1]), "dash", "in random order").line(
        share[some], values[some], "main", "by uncertainty"
    )
    chart.line(share[some], best[some], "soft thin", "at best")
    show = number if output.numeric else (lambda v: percent(v, 1))
    parts = [(percent(s), show(float(values[max(0, round(s * len(values)) - 1)]))) for s in (0.25, 0.5, 0.75, 1.0)]
    words = ", ".join(f"{value} for the most certain {share}" for share, value in parts)
    return figure(
        chart.svg(f"Risk-coverage curve: {what} {words}."),
        "Risk and coverage",
        "What is left of the error if the least certain rows are handed to somebody else. The further below the dashed line, the "
        "more the uncertainty is worth.",
    )


def band(output: Output, xlabel: str) -> str:
    """Mean, 50 % and 90 % bands over the only input, with the data."""
    found = output.band
    grid, levels = found["x"], found["quantiles"]
    points = [output.arrays["y"], *([found["y_train"]] if "y_train" in found else [])]
    low, high = limits(levels[0], levels[-1], *points)
    reach = limits(*points, margin=1.0)
    chart = Chart((float(grid[0]), float(grid[-1])), (max(low, reach[0]), min(high, reach[1])), xlabel, output.name, height=290)
    chart.area(grid, levels[0], levels[4], "band", "90 %").area(grid, levels[1], levels[3], "inner", "50 %")
    chart.line(grid, found["mean"], "main", "mean")
    if "y_train" in found:
        chart.dots(found["x_train"], found["y_train"], "soft", 1.6, "training rows")
    some = thin(output.count, 400)
    chart.dots(found["x_heldout"][some], output.arrays["y"][some], "ink", 2.2, "held-out rows")
    widths = levels[4] - levels[0]
    return figure(
        chart.svg(
            f"Predictive mean and bands of {output.name} over {xlabel}: the 90 % band is {number(float(widths.min()))} wide at its "
            f"narrowest and {number(float(widths.max()))} at {xlabel} = {number(float(grid[widths.argmax()]))}, its widest."
        ),
        "Predictive bands",
        "Nine tenths of new rows should fall into the light band, half into the dark one. It should widen where there are no "
        "training rows.",
    )


def uncertainties(output: Output, xlabel: str) -> str:
    """Standard deviations of noise and of disagreement over the only input."""
    found = output.band
    grid, inner, noise = found["x"], np.sqrt(found["epistemic"]), np.sqrt(found["aleatoric"])
    chart = Chart(
        (float(grid[0]), float(grid[-1])),
        (0, 1.08 * float(max(inner.max(), noise.max())) or 1.0),
        xlabel,
        f"standard deviation of {output.name}",
        height=290,
    )
    chart.line(grid, inner, "second", "epistemic").line(grid, noise, "main", "noise (aleatoric)")
    return figure(
        chart.svg(
            f"Standard deviations over {xlabel}: epistemic from {number(float(inner.min()))} to {number(float(inner.max()))}, "
            f"noise from {number(float(noise.min()))} to {number(float(noise.max()))}."
        ),
        "Where the uncertainty comes from",
        "Epistemic is the disagreement of draws, which more data would remove; noise is what they would not.",
    )


def training(history: Mapping[str, Sequence[float]], most: int = 6) -> list[str]:
    """A trace of each logged term over the epochs, or over the transitions of chains, warm-up among them."""
    found = []
    unit, mean = ("transition", "Mean over the chains") if "divergent" in history else ("epoch", "Mean of each epoch")
    for name, values in list(history.items())[:most]:
        array = np.asarray(values, dtype=np.float64)
        if len(array) < 2 or not np.isfinite(array).any():
            continue
        some = thin(len(array), 400)
        finite = array[np.isfinite(array)]
        low, high = limits(finite)
        early = float(np.quantile(finite, 0.1))
        if len(array) > 20 and high - early > 0 and (early - low) / (high - early) > 3:
            low = early - 0.2 * (high - early)  # a first epoch from a bad start would flatten all others
        chart = Chart((1, len(array)), (low, high), unit, name.replace("_", " "))
        chart.line(some + 1, array[some], "main")
        cut = " The beginning lies below the picture." if low > float(finite.min()) else ""
        found.append(
            figure(
                chart.svg(f"{label(name)} over {len(array)} {unit}s, from {number(finite[0])} to {number(finite[-1])}."),
                name.replace("_", " "),
                f"{mean}{', on the scale of the whole data' if name.startswith('log_') or unit == 'epoch' else ''}: "
                f"{number(finite[0])} at first, {number(finite[-1])} at last.{cut}",
            )
        )
    return found


def chain_traces(traces: Mapping[str, np.ndarray]) -> list[str]:
    """Function values of each chain over its draws, at a few inputs."""
    values = traces["values"]
    found = []
    for index in range(values.shape[2]):
        own = values[:, :, index]
        some = thin(own.shape[1], 300)
        chart = Chart((1, own.shape[1]), limits(own), "kept draw", "network output", height=200)
        for chain in range(min(len(own), len(SERIES))):
            chart.line(some + 1, own[chain, some], f"{SERIES[chain]} thin", f"chain {chain + 1}" if len(own) > 1 else "")
        means = ", ".join(number(float(mean)) for mean in own.mean(1))
        spread = ", ".join(number(float(spread)) for spread in own.std(1))
        more = f" The first {len(SERIES)} of {len(own)} chains." if len(own) > len(SERIES) else ""
        found.append(
            figure(
                chart.svg(f"Traces of the network's output at an input: means of the chains {means}; spreads {spread}."),
                f"Trace {index + 1}",
                f"The first output at one input. Chains should look alike and wander around one level.{more}",
            )
        )
    return found


def chain_ranks(traces: Mapping[str, np.ndarray], bins: int = 20) -> str:
    """Histograms, one for each chain, of the ranks of its draws among those of all chains (Vehtari et al. 2021)."""
    shares = rank_shares(traces["values"], bins)
    chains, bins = shares.shape
    edges = np.linspace(0, 1, bins + 1)
    chart = Chart((0, 1), (0, 1.1 * float(shares.max())), "rank among all draws (share)", "density")
    for chain in range(min(chains, len(SERIES))):
        xs = np.repeat(edges, 2)[1:-1]
        chart.line(xs, np.repeat(shares[chain], 2), SERIES[chain], f"chain {chain + 1}")
    chart.line((0, 1), (1, 1), "dash", "equal chains")
    return figure(
        chart.svg(
            "Rank histograms of the chains: between "
            + "; ".join(f"{number(float(row.min()), 2)} and {number(float(row.max()), 2)}" for row in shares)
            + "; chains that agree are near 1."
        ),
        "Ranks",
        "How the draws of each chain rank among those of all. Flat if chains agree; a chain that keeps to one side has not met the "
        "others.",
    )


def energies(traces: Mapping[str, np.ndarray], bins: int = 30) -> str:
    """Energies around their mean and their changes in a transition, all chains together (Betancourt 2016)."""
    energy, change = traces["energy"], traces.get("energy_change")
    around = (energy - energy.mean(1, keepdims=True)).ravel()
    changes = (np.diff(energy, axis=1) if change is None else change).ravel()
    ends = float(np.quantile(np.abs(np.concatenate([around, changes])), 0.995)) or 1.0
    edges = np.linspace(-ends, ends, bins + 1)
    heights = [np.histogram(values, edges, density=True)[0] for values in (around, changes)]
    chart = Chart((-ends, ends), (0, 1.1 * max(float(part.max()) for part in heights)), "energy (nats)", "density")
    for part, kind, name in zip(heights, SERIES, ("around its mean", "change in a transition")):
        chart.line(np.repeat(edges, 2)[1:-1], np.repeat(part, 2), kind, name)
    seen = [None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in (energy, change)]
    found = diagnostics.ebfmi(*seen).numpy()  # type: ignore[arg-type]
    said = ", ".join(number(float(value), 2) for value in found)
    return figure(
        chart.svg(f"Energies spread by {number(float(around.std()))} nats, their changes by {number(float(changes.std()))}."),
        "Energies",
        f"Changes should be about as wide as the energies themselves; much narrower ones reach the tails slowly. E-BFMI of the "
        f"chains: {said}; below 0.3 is too small.",
    )


def convergence(traces: Mapping[str, np.ndarray]) -> str:
    """R̂ against effective sample size of each function value."""
    rhat, ess = traces["rhat"], traces["ess"]
    fine = np.isfinite(rhat) & np.isfinite(ess)
    rhat, ess = rhat[fine], ess[fine]
    if not len(rhat):
        return ""
    top = max(1.06, float(rhat.max()))
    chart = Chart((0, 1.05 * float(ess.max())), (0.99, top + 0.04 * (top - 0.99)), "effective draws", "R̂")
    ends = (0, 1.05 * float(ess.max()))
    chart.line(ends, (1.01, 1.01), "dash", "1.01").dots(ess, rhat, "main", 2.5, "function values")
    return figure(
        chart.svg(
            f"R-hat of {len(rhat)} function values from {rhat.min():.3f} to {rhat.max():.3f}, effective draws from "
            f"{ess.min():.0f} to {ess.max():.0f}."
        ),
        "Convergence",
        "Each point is one output at one input. Well mixed chains lie at the lower right: R̂ below 1.01, many effective draws.",
    )
