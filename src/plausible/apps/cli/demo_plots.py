"""The plots of `plausible demo`, by matplotlib, each drawn for light and for dark screens.

A plot is a function that draws on a figure in the colours of a theme; `Plots` calls it for both and gives the HTML.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.apps.cli import demo
from plausible.apps.report.statistics import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plausible.apps.cli.demo import Outcome, Problem


@dataclass(frozen=True)
class Theme:
    """Colours of a plot; `paper` is the colour of the card it lies on."""

    paper: str
    ink: str
    faint: str
    main: str
    wide: str
    narrow: str
    alarm: str


LIGHT = Theme("#ffffff", "#24292f", "#8a9199", "#1f5f99", "#cfe0f0", "#94bbdf", "#c4421a")
DARK = Theme("#1d2126", "#dfe3e8", "#858d96", "#8cc4f2", "#2b435a", "#41688e", "#ff8a5c")

Draw = Callable[["Figure", Theme], None]
DPI = 180


class Plots:
    """Draws figures in both themes, writes the light one to the folder and gives the HTML that shows them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def picture(self, name: str, size: tuple[float, float], draw: Draw, alt: str) -> str:
        """A `<picture>` with both versions embedded."""
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        images = []
        for theme in (LIGHT, DARK):
            settings: Any = {
                "font.size": 10,
                "font.family": ["DejaVu Sans"],
                "text.color": theme.ink,
                "axes.labelcolor": theme.ink,
                "xtick.color": theme.faint,
                "ytick.color": theme.faint,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "axes.edgecolor": theme.faint,
                "axes.facecolor": theme.paper,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "legend.frameon": False,
            }
            with rc_context(settings):
                figure = Figure(figsize=size, dpi=DPI, facecolor=theme.paper)
                FigureCanvasAgg(figure)
                draw(figure, theme)
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png")
            images.append(buffer.getvalue())
        (self.folder / f"{name}.png").write_bytes(images[0])
        light, dark = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
        wide, high = round(DPI * size[0]), round(DPI * size[1])
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" width="{wide}" height="{high}" alt="{html.escape(alt)}"></picture>'
        )


# ---------------------------------------------------------------------------------------------------------------------
# The plots


def bands(problem: Problem, outcome: Outcome, limits: tuple[float, float], spread: float) -> Draw:
    """Mean, 50 % and 90 % bands over the data; below, the standard deviations of noise and of disagreement."""

    def draw(figure: Figure, theme: Theme) -> None:
        a = outcome.arrays
        grid, levels = a["grid"], a["quantiles"]
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.12, top=0.98, hspace=0.08)
        for axes in (above, below):
            axes.axvspan(-demo.GAP, demo.GAP, color=theme.faint, alpha=0.14, linewidth=0)
        above.fill_between(grid, levels[0], levels[3], color=theme.wide, linewidth=0, label="90 %")
        above.fill_between(grid, levels[1], levels[2], color=theme.narrow, linewidth=0, label="50 %")
        above.plot(grid, demo.curve(grid), color=theme.faint, linestyle=(0, (4, 2)), linewidth=1.2, label="truth")
        above.plot(grid, a["mean"], color=theme.main, linewidth=1.8, label="mean")
        x, y = (part[:, 0].numpy() for part in problem.train)
        above.plot(x, y, linestyle="", marker="o", markersize=3, color=theme.ink, label="data")
        above.set(ylim=limits, xlim=(grid[0], grid[-1]))
        above.text(0, limits[0] + 0.03 * (limits[1] - limits[0]), "gap: no data", ha="center", fontsize=9, color=theme.ink)
        above.legend(loc="upper center", ncols=5, fontsize=8, columnspacing=0.9, handlelength=1.2, handletextpad=0.4)
        below.fill_between(grid, 0, a["epistemic"], color=theme.alarm, alpha=0.55, linewidth=0, label="epistemic")
        below.plot(grid, a["aleatoric"], color=theme.ink, linewidth=1.2, linestyle=":", label="noise")
        below.set(ylim=(0, spread), xlabel="x", ylabel="std")
        below.legend(loc="upper center", ncols=2, fontsize=8, columnspacing=1.0, handlelength=1.2, handletextpad=0.4)

    return draw


def faces(problem: Problem, outcome: Outcome, count: int = 5) -> tuple[Draw, str]:
    """The digits with the highest and the lowest entropy, with answer, probability and mutual information."""
    a = outcome.arrays
    images, truth = problem.test[0].numpy().reshape(-1, 8, 8), problem.test[1].numpy()
    order = np.argsort(a["entropy"], kind="stable")
    rows = (("least confident", order[::-1][:count]), ("most confident", order[:count]))

    def draw(figure: Figure, theme: Theme) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        shades = LinearSegmentedColormap.from_list("digits", [theme.paper, theme.ink])
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        for row, (heading, chosen) in enumerate(rows):
            top = 18 * row
            axes.text(0, top, heading, va="center", fontsize=10, fontweight="bold")
            for column, index in enumerate(chosen):
                wrong, probs = bool(a["wrong"][index]), a["probs"][index]
                left, colour = 10 * column, theme.alarm if wrong else theme.ink
                note = f"MI {a['information'][index]:.2f}" + (f"\nis {truth[index]}" if wrong else "")
                axes.text(
                    left + 4, top + 3, f"{probs.argmax()}: {_percent(probs.max())}", ha="center", va="center", color=colour
                )
                axes.imshow(images[index], cmap=shades, vmin=0, vmax=1, extent=(left, left + 8, top + 12.2, top + 4.2))
                axes.text(left + 4, top + 12.8, note, ha="center", va="top", fontsize=9, color=colour)
        axes.set(xlim=(-1, 49), ylim=(34.5, -2), aspect="equal")

    words = []
    for heading, chosen in rows:
        answers = ", ".join(f"{a['probs'][i].argmax()} ({_percent(a['probs'][i].max())})" for i in chosen)
        words.append(f"{heading}: {answers}")
    return draw, "; ".join(words)


def entropies(outcomes: Sequence[Outcome]) -> Draw:
    """For each method the entropies of right answers (bar: middle half, line: middle 90 %) and every wrong answer as a dot."""

    def draw(figure: Figure, theme: Theme) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        for row, outcome in enumerate(outcomes):
            values, wrong = outcome.arrays["entropy"], outcome.arrays["wrong"]
            if (~wrong).any():
                low, first, middle, third, high = np.quantile(values[~wrong], [0.05, 0.25, 0.5, 0.75, 0.95])
                axes.plot([low, high], [row - 0.17] * 2, color=theme.main, linewidth=1.5)
                axes.plot([first, third], [row - 0.17] * 2, color=theme.main, linewidth=8, solid_capstyle="butt")
                axes.plot(middle, row - 0.17, marker="|", markersize=12, color=theme.ink)
            height = row + 0.17 + 0.09 * np.resize([0, 1, -1], wrong.sum())
            axes.plot(values[wrong], height, linestyle="", marker="o", markersize=4, color=theme.alarm, alpha=0.7)
        axes.plot([], [], color=theme.main, linewidth=8, label="right answers")
        axes.plot([], [], linestyle="", marker="o", markersize=4, color=theme.alarm, label="wrong answers")
        axes.set(yticks=range(len(outcomes)), yticklabels=[outcome.entry.label for outcome in outcomes])
        axes.set(xlim=(-0.03, np.log(10)), ylim=(len(outcomes) - 0.5, -0.5), xlabel="entropy of the prediction (nats)")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside upper right", ncols=2, fontsize=9, handlelength=1.2)

    return draw


def reliability(problem: Problem, outcome: Outcome, bins: int = 10) -> tuple[Draw, str]:
    """Share of right answers against stated probability, in equal bins, with 90 % binomial (Wilson) intervals."""
    confidence = outcome.arrays["probs"].max(-1).astype(float)
    right = ~outcome.arrays["wrong"]
    which = np.clip(np.ceil(confidence * bins).astype(int), 1, bins) - 1
    points = []
    for b in range(bins):
        if count := int((which == b).sum()):
            share = float(right[which == b].mean())
            points.append((confidence[which == b].mean(), share, *wilson(share, count), count))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.19, right=0.98, bottom=0.17, top=0.98)
        axes.plot([0, 1], [0, 1], color=theme.faint, linestyle=(0, (4, 2)), linewidth=1.2)
        for said, share, low, high, count in points:
            axes.plot([said, said], [low, high], color=theme.narrow, linewidth=2)
            axes.plot(said, share, marker="o", markersize=6, color=theme.main)
            axes.text(said, -0.07, f"{count}", ha="center", va="center", fontsize=8)
        axes.set(
            xticks=(0, 0.5, 1),
            yticks=(0, 0.5, 1),
            xlim=(0, 1.04),
            ylim=(-0.12, 1.04),
            xlabel="stated probability",
            ylabel="share right",
            aspect="equal",
        )

    total = len(problem.test[1])
    alt = ", ".join(f"said {said:.0%}, right {share:.0%} ({count} of {total})" for said, share, _, _, count in points)
    return draw, alt


def _percent(share: float) -> str:
    """Rounded down where rounding up would claim certainty."""
    return ">99 %" if share > 0.99 else f"{share:.0%}".replace("%", " %")
