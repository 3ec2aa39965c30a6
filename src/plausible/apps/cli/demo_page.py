"""The page of `plausible demo`: the tables, and figures of the curve and of the digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.apps import plots
from plausible.apps.pages import Shown, png, render, shown
from plausible.apps.plots.heldout import draw_entropies, draw_uncertainties
from plausible.apps.report.words import percent
from plausible.posteriors.drawing import draw_band

if TYPE_CHECKING:
    from plausible.apps.cli.demo import DemoOutcome, Digits, Regression


def written(line: Any, images: Any, quick: bool, made: str) -> str:
    """The page of both problems, each with its outcomes and the cells of its table; everything in it comes from the run."""
    good, fine = ([each for each in outcomes if not each.error] for _, outcomes, _ in (line, images))
    tables, about = [], []
    for problem, outcomes, texts in (line, images):
        rows = [(each.entry.label, each.error, text) for each, text in zip(outcomes, texts)]
        tables.append({"title": problem.title, "heads": list(problem.columns), "rows": rows})
        about += [(each.entry.label, each.entry.about, problem.key, str(each.entry.method)) for each in outcomes]
    curve, digits = line[0], images[0]
    return render(
        "demo.html.j2",
        title="What a network knows, and what it does not",
        quick=quick,
        tables=tables,
        bands=_bands(curve, good),
        faces=[(outcome.entry.label, *_faces(digits, outcome)) for outcome in fine],
        entropies=_entropies(fine) if fine else None,
        reliabilities=[_reliability(digits, outcome) for outcome in fine],
        train_digits=f"{len(digits.train[1]):,}",
        test_digits=f"{len(digits.test[1]):,}",
        methods=about,
        made=made,
    )


def _bands(problem: Regression, outcomes: Sequence[DemoOutcome]) -> list[Shown]:
    """Mean and bands over the data; below, the standard deviations of noise and of disagreement; all on the same axes."""
    if not outcomes:
        return []
    heights = np.concatenate([*(each.arrays["quantiles"].ravel() for each in outcomes), problem.train[1].numpy().ravel()])
    low, high = max(float(heights.min()), -5.0), min(float(heights.max()), 5.0)
    room = high - low
    top = max(float(max(each.arrays["epistemic"].max(), each.arrays["aleatoric"].max())) for each in outcomes)

    def draw(panels: Any, arrays: Mapping[str, np.ndarray]) -> None:
        above, below = panels
        grid = arrays["grid"]
        for ax in panels:
            ax.axvspan(-problem.gap, problem.gap, color="0.5", alpha=0.14, linewidth=0)
        draw_band(above, grid, arrays["quantiles"], arrays["mean"])
        above.plot(grid, problem.curve(grid), color="0.5", linestyle=(0, (4, 2)), label="truth")
        above.plot(*(part[:, 0].numpy() for part in problem.train), "o", markersize=3, color="0", label="data")
        above.set(ylim=(low - 0.12 * room, high + 0.05 * room))
        above.text(0, low - 0.09 * room, "gap: no data", ha="center", fontsize=10)
        draw_uncertainties(below, grid, arrays["epistemic"], arrays["aleatoric"])
        below.set(ylim=(0, 1.1 * min(top, 2.0)), xlabel="x", ylabel="std")
        above.legend()
        below.legend()

    figures = []
    for outcome in outcomes:
        label, values = outcome.entry.label, outcome.values
        caption = f"epistemic std {values['epistemic_data']:.2f} at the data, {values['epistemic_gap']:.2f} in the gap"
        alt = f"Predictions of {label} with 50 % and 90 % bands over 60 data points; {caption}."
        drawn = partial(draw, arrays=outcome.arrays)
        figures.append(shown(drawn, label, f"band {label}", alt, caption, size=(5.0, 4.6), panels=2))
    return figures


def _faces(problem: Digits, outcome: DemoOutcome, count: int = 5) -> tuple[str, list[tuple[str, list[dict[str, Any]]]]]:
    """How many are wrong, and the digits with the highest and the lowest entropy."""
    arrays, truth = outcome.arrays, problem.test[1].numpy()
    images = problem.test[0].numpy().reshape(-1, 8, 8)
    order = np.argsort(arrays["entropy"], kind="stable")

    def face(index: int) -> dict[str, Any]:
        probs = arrays["probs"][index]
        return {
            "picture": png(images[index]),
            "predicted": f"{probs.argmax()} ({percent(float(probs.max()))})",
            "uncertain": f"MI {arrays['information'][index]:.2f}",
            "truth": str(truth[index]),
            "missed": bool(arrays["wrong"][index]),
        }

    ends = {"Least confident": order[::-1][:count], "Most confident": order[:count]}
    wrong = f"{int(arrays['wrong'].sum())} of {len(arrays['wrong'])} wrong"
    return wrong, [(heading, [face(index) for index in chosen.tolist()]) for heading, chosen in ends.items()]


def _entropies(outcomes: Sequence[DemoOutcome]) -> Shown:
    rows = {each.entry.label: (each.arrays["entropy"], each.arrays["wrong"]) for each in outcomes}
    medians = []
    for name, (values, wrong) in rows.items():
        right, missed = (f"{np.median(values[part]):.2f}" if part.any() else "none" for part in (~wrong, wrong))
        medians.append(f"{name} {right} and {missed}")
    caption = f"Median entropy of right and of wrong answers: {'; '.join(medians)}."
    size = (6.5, 1.2 + 0.45 * len(rows))
    return shown(lambda ax: draw_entropies(ax, rows), "", "entropies", caption, caption, size=size)


def _reliability(problem: Digits, outcome: DemoOutcome) -> Shown:
    probs, y, label = outcome.arrays["probs"].astype(float), problem.test[1], outcome.entry.label
    probs = probs / probs.sum(-1, keepdims=True)
    points = [point for point in zip(*metrics.reliability(probs, y, 10)) if point[2]]
    words = ", ".join(f"said {float(said):.0%}, right {float(share):.0%} ({int(count)})" for said, share, count in points)
    alt = f"Reliability of {label}: {words}."
    caption = f"calibration error {outcome.values['ece']:.3f}"
    return shown(lambda ax: plots.reliability(probs, y, ax=ax), label, f"reliability {label}", alt, caption, size=(3.6, 3.6))
