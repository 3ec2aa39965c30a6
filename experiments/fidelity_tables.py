"""The tables and figures of `python -m experiments fidelity`, from stored results alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from experiments import figures
from experiments.frame import Result, Results, Sheet, look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {
    "wasserstein": "W₂ of f",
    "total_variation": "total variation",
    "agreement": "agreement",
    "epistemic.inside": "inside",
    "epistemic.between": "between",
    "epistemic.outside": "outside",
    "log_likelihood": "log-lik.",
    "stein": "Stein",
}
REGIONS = ("inside", "between", "outside")
BANDS = ("map", "ensemble", "laplace", "laplace-full", "mean-field", "full-rank", "sgld", "nuts")


def split(name: str) -> tuple[str, str]:
    """`gap-mean-field` → `("gap", "mean-field")`."""
    problem, _, method = name.partition("-")
    return problem, method


def value(result: Result | None, column: str, key: str = "value") -> float:
    """A number of a cell, the mean over its seeds; NaN where there is none."""
    found = []
    for each in (result or {}).get("fidelity", ()):
        first, _, region = column.partition(".")
        at = each[first].get(region, {}).get("ratio", {}) if region else each[first]
        found.append(at.get(key))
    numbers = [math.nan if number is None else float(number) for number in found]
    return sum(numbers) / len(numbers) if numbers else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def sheets(results: Results) -> list[Sheet]:
    """One problem: a row for each method, the nearest first; those that do not apply below."""
    problem = split(next(iter(results)))[0]
    truth, base = results.get(f"{problem}-reference"), look(results, f"{problem}-map", "fit")
    shown = [c for c in COLUMNS if any(not math.isnan(value(result, c)) for result in results.values())]
    done = {name: r for name, r in results.items() if "fidelity" in r and name != f"{problem}-reference"}
    order = sorted(done, key=lambda name: value(done[name], "wasserstein"))
    rows = [_row(split(name)[1], done[name], shown, base, truth) for name in order]
    if truth is not None:
        floor = ["noise floor", *(_number(value(truth, c, "floor")) for c in shown), "–"]
        rows.insert(0, tuple(floor))
    found = [Sheet("", ("method", *(COLUMNS[c] for c in shown), "time / MAP"), tuple(rows))]
    if truth is not None:
        found.append(_about(truth))
    left = {split(name)[1]: r["reason"] for name, r in results.items() if "reason" in r}
    if left:
        rows = [(f"`{name}`", reason.partition(": ")[2]) for name, reason in left.items()]
        found.append(Sheet("Not applicable", ("method", "why"), tuple(rows)))
    return found


def _row(method: str, result: Result, columns: list[str], base: Any, truth: Result | None) -> tuple[str, ...]:
    """Numbers that cannot be told from another run of the reference are bold."""
    cells = []
    for column in columns:
        number, error = value(result, column), value(result, column, "error")
        floor, ideal = value(truth, column, "floor"), value(truth, column, "ideal")
        words = _pair(number, error)
        cells.append(f"**{words}**" if abs(number - ideal) <= abs(floor - ideal) + 2 * error else words)
    return (f"`{method}`", *cells, _ratio(result["fit"], base))


def _about(truth: Result) -> Sheet:
    """The reference: how long, and whether it converged."""
    chains = truth["settings"]["reference"]
    facts = {key: float(number) for key, number in truth["diagnostics"].items()}
    levels = truth["fidelity"][0]["epistemic"]
    head = (
        "reference",
        "rows",
        "weights",
        "R̂ of f",
        "ESS, bulk",
        "ESS, tail",
        "divergences",
        *(f"sd of E[y], {name}" for name in levels),
    )
    row = (
        f"{chains['type']}, {chains['chains']} × {chains['draws']:,}",
        f"{truth['rows']:,}",
        f"{truth['weights']:,}",
        f"{facts.get('rhat', math.nan):.3f}",
        f"{facts.get('ess_bulk', math.nan):,.0f}",
        f"{facts.get('ess_tail', math.nan):,.0f}",
        f"{facts.get('divergences', 0):.0f}",
        *(_number(math.sqrt(part["reference"])) for part in levels.values()),
    )
    return Sheet("", head, (row,))


def settings(results: Results) -> list[Sheet]:
    """What each method was run with: its settings where they are not the defaults, and how they differ between problems."""
    found: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        problem, method = split(name)
        own = result["settings"]["method"]
        if isinstance(own, Mapping):
            found.setdefault(method, {})[problem] = text(own)
    rows = []
    for method, by_problem in found.items():
        distinct = dict.fromkeys(by_problem.values())
        words = [
            f"{', '.join(p for p, t in by_problem.items() if t == one)}: {one}" if len(distinct) > 1 else one
            for one in distinct
        ]
        rows.append((f"`{method}`", "<br>".join(f"`{word}`" for word in words)))
    return [Sheet("", ("method", "settings that are not the defaults"), tuple(rows))]


def text(plain: Mapping[str, Any]) -> str:
    """`MAP(epochs=4000, …)`: a stored dataclass, without what is at its default."""
    from plausible.core.serialise import decode

    made = decode(dict(plain))
    if not is_dataclass(made):
        return repr(made)
    parts = []
    for own in fields(made):
        default = own.default if own.default_factory is MISSING else own.default_factory()
        stored = plain.get(own.name)
        # decoded: a record that knew fewer settings is no other setting
        if own.name in plain and (default is MISSING or getattr(made, own.name) != default):
            parts.append(f"{own.name}={text(stored) if isinstance(stored, Mapping) else repr(stored)}")
    return f"{type(made).__name__}({', '.join(parts)})"


def _pair(number: float, error: float) -> str:
    """`0.047 ± 0.004`: as many places as the first digit of the error asks for, four at most."""
    if math.isnan(number) or not error > 5e-5:
        return _number(number)
    places = min(4, max(0, math.ceil(-math.log10(error))))
    return f"{number:,.{places}f} ± {error:,.{places}f}".replace("-", "−")


def _number(number: float) -> str:
    """Two digits."""
    if math.isnan(number):
        return "–"
    if abs(number) < 5e-5:
        return "0"
    places = max(0, 1 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(places, 4)}f}".replace("-", "−")


def _ratio(seconds: Any, base: Any) -> str:
    if not seconds or not base or not sum(base):
        return "–"
    return _number(sum(seconds) / len(seconds) / (sum(base) / len(base)))


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def _grid(results: Results) -> tuple[list[str], list[str]]:
    """Problems, and methods that have results, the nearest first by the mean rank of W₂."""
    problems = list(dict.fromkeys(split(name)[0] for name in results))
    methods = [m for m in dict.fromkeys(split(name)[1] for name in results) if m not in ("reference", "exact")]
    methods = [m for m in methods if any("fidelity" in results.get(f"{p}-{m}", {}) for p in problems)]

    def level(method: str) -> float:
        found = [value(results.get(f"{p}-{method}"), "wasserstein") for p in problems]
        logs = [math.log(v) for v in found if v > 0]
        return sum(logs) / len(logs) if logs else math.inf

    return problems, sorted(methods, key=level)


def draw_distances(results: Results) -> Figure:
    """W₂ of f(x) in standard deviations of the reference, methods × problems."""
    problems, methods = _grid(results)
    figure, ax = figures.new(1, 1, (1.6 + 1.25 * len(problems), 1.2 + 0.27 * len(methods)))
    grid = [[value(results.get(f"{p}-{m}"), "wasserstein") for p in problems] for m in methods]
    _heat(ax, [[math.log10(v) if v > 0 else math.nan for v in row] for row in grid], grid, "viridis_r", (-1.5, 0.5))
    _labels(ax, problems, methods)
    ax.set_title("W₂ of f(x), in sd of the reference", fontsize="small")
    return figure


def draw_epistemic(results: Results) -> Figure:
    """Epistemic variance over the reference's, methods × regions, one panel for each problem."""
    problems, methods = _grid(results)
    figure, axes = figures.new(
        1, max(len(problems), 1), (1.4 + 2.1 * len(problems), 1.4 + 0.27 * len(methods)), squeeze=False, sharey=True
    )
    for ax, problem in zip(axes[0], problems):
        cells = [results.get(f"{problem}-{m}") for m in methods]
        regions = [r for r in REGIONS if any(not math.isnan(value(cell, f"epistemic.{r}")) for cell in cells)]
        grid = [[value(cell, f"epistemic.{r}") for r in regions] for cell in cells]
        logs = [[math.log10(max(v, 1e-3)) if not math.isnan(v) else math.nan for v in row] for row in grid]
        if regions:
            _heat(ax, logs, grid, "RdBu_r", (-1, 1))
        _labels(ax, regions, methods)
        ax.set_title(problem, fontsize="small")
    return figure


def _heat(ax: Any, levels: list[list[float]], numbers: list[list[float]], colours: str, limits: tuple[float, float]) -> None:
    if not levels or not levels[0]:
        return
    ax.imshow(levels, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto")
    middle, half = (limits[0] + limits[1]) / 2, (limits[1] - limits[0]) / 2
    for row, (own, shown) in enumerate(zip(levels, numbers)):
        for column, (level, number) in enumerate(zip(own, shown)):
            deep = level > middle if colours == "viridis_r" else abs(level - middle) > 0.7 * half
            ax.text(column, row, _number(number), ha="center", va="center", fontsize=7, color="white" if deep else "black")


def _labels(ax: Any, columns: list[str], rows: list[str]) -> None:
    ax.set_xticks(range(len(columns)), columns, fontsize="small")
    ax.set_yticks(range(len(rows)), rows, fontsize="x-small")
    ax.tick_params(length=0)


def draw_bands(results: Results) -> Figure:
    """Mean and two standard deviations of f of some methods, over those of the reference."""
    truth = results.get("gap-reference")
    names = [m for m in BANDS if look(results, f"gap-{m}", "line")]
    columns = 4
    rows = max(1, -(-len(names) // columns))
    figure, axes = figures.new(rows, columns, (2.8 * columns, 2.3 * rows + 0.5), squeeze=False, sharex=True, sharey=True)
    flat = [ax for row in axes for ax in row]
    x = [-5 + 0.1 * k for k in range(101)]
    for ax, name in zip(flat, names):
        if truth is not None:
            ax.plot(*truth["axis"]["data"], "x", color="0.35", markersize=2.5, markeredgewidth=0.5, label="data")
            mean, std = truth["line"][0]["mean"], truth["line"][0]["std"]
            for sign in (-2, 2):
                edge = [m + sign * s for m, s in zip(mean, std)]
                ax.plot(x, edge, color="black", linewidth=0.9, linestyle="--", label="reference, ± 2 sd" if sign > 0 else None)
        own = results[f"gap-{name}"]["line"][0]
        for width, alpha in ((2, 0.2), (1, 0.35)):
            low, high = ([m + s * width * d for m, d in zip(own["mean"], own["std"])] for s in (-1, 1))
            ax.fill_between(x, low, high, color="C0", alpha=alpha, linewidth=0, label=f"± {width} sd of f")
        ax.plot(x, own["mean"], color="C3", linewidth=1.0, label="mean")
        ax.set(xlim=(-5, 5), ylim=(-3.5, 3.5))
        ax.set_title(name, fontsize="small")
    for ax in flat[len(names) :]:
        ax.set_axis_off()
    if names:
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return figure
