"""The page of `plausible demo`: the tables, and figures of the curve and of the digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        rows = [(each.entry.label, each.error, text, each.fault) for each, text in zip(outcomes, texts)]
        tables.append({"title": problem.title, "heads": list(problem.columns), "rows": rows})
        about += [(each.entry.label, each.entry.about, problem.key, each.choice or str(each.entry.method)) for each in outcomes]
    curve, digits = line[0], images[0]
    first = next((each for each in good if each.entry.key == "auto"), None)
    return render(
        "demo.html.j2",
        title="plausible",
        quick=quick,
        tables=tables,
        opening=_opening(curve, first) if first else None,
        bands=[_band(curve, each) for each in good if not each.fault],
        narrow=[_band(curve, each) for each in good if each.fault],
        faces=[(outcome.entry.label, *_faces(digits, outcome)) for outcome in fine],
        strangers=[(outcome.entry.label, *_strangers(digits, outcome)) for outcome in fine],
        strange=_strange(fine[0]) if fine else None,
        entropies=_entropies(fine) if fine else None,
        reliabilities=[_reliability(digits, outcome) for outcome in fine],
        train_digits=f"{len(digits.train[1]):,}",
        test_digits=f"{len(digits.test[1]):,}",
        strange_digits=f"{len(digits.strange[1]):,}",
        methods=about,
        made=made,
    )


def _draw_curve(problem: Regression, ax: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Mean and bands over the data, on the range that they need."""
    grid, (x, y) = arrays["grid"], (part[:, 0].numpy() for part in problem.train)
    draw_band(ax, grid, arrays["quantiles"], arrays["mean"])
    ax.plot(grid, problem.curve(grid), color="0.5", linestyle=(0, (4, 2)), label="truth")
    ax.plot(x, y, "o", markersize=3, color="0", label="data")
    low, high = min(float(arrays["quantiles"].min()), y.min()), max(float(arrays["quantiles"].max()), y.max())
    room = high - low
    ax.axvspan(-problem.gap, problem.gap, color="0.5", alpha=0.14, linewidth=0)
    ax.set(ylim=(low - 0.14 * room, high + 0.05 * room), xlabel="x", ylabel="y")
    ax.text(0, low - 0.1 * room, "gap: no data", ha="center", fontsize=10)
    ax.legend()


def _opening(problem: Regression, outcome: DemoOutcome) -> Shown:
    caption = f"One call, nothing chosen by hand; fit chose {outcome.choice}." if outcome.choice else ""
    alt = f"Predictions of {outcome.entry.label} with 50 % and 90 % bands over 60 data points on both sides of a gap."
    return shown(lambda ax: _draw_curve(problem, ax, outcome.arrays), "", "opening", alt, caption, size=(8.4, 3.3))


def _band(problem: Regression, outcome: DemoOutcome) -> Shown:
    """The curve; below, the standard deviations of noise and of disagreement. Each figure has a range of its own."""

    def draw(panels: Any) -> None:
        above, below = panels
        _draw_curve(problem, above, outcome.arrays)
        below.axvspan(-problem.gap, problem.gap, color="0.5", alpha=0.14, linewidth=0)
        draw_uncertainties(below, outcome.arrays["grid"], outcome.arrays["epistemic"], outcome.arrays["aleatoric"])
        above.set(xlabel="")
        below.set(xlabel="x", ylabel="std")
        below.legend()

    label, values = outcome.entry.label, outcome.values
    caption = f"Epistemic std {values['epistemic_data']:.2f} at the data, {values['epistemic_gap']:.2f} in the gap."
    alt = f"Predictions of {label} with 50 % and 90 % bands over 60 data points. {caption}"
    caption = f"{caption} {outcome.fault[:1].upper()}{outcome.fault[1:]}." if outcome.fault else caption
    return shown(draw, label, f"band {label}", alt, caption, size=(5.0, 4.6), panels=2)


Faces = list[tuple[str, list[dict[str, Any]]]]


def _face(outcome: DemoOutcome, image: np.ndarray, truth: int, index: int, end: str = "") -> dict[str, Any]:
    """One picture with what was said of it; `end` is that of the names of the arrays."""
    probs = outcome.arrays[f"probs{end}"][index]
    return {
        "picture": png(image),
        "predicted": f"{probs.argmax()} ({percent(float(probs.max()))})",
        "uncertain": f"MI {outcome.arrays[f'information{end}'][index]:.2f}",
        "truth": str(truth),
        "missed": int(probs.argmax()) != truth,
    }


def _faces(problem: Digits, outcome: DemoOutcome, count: int = 5) -> tuple[str, Faces]:
    """How many are wrong, and the digits with the highest and the lowest entropy."""
    wrong, truth = outcome.arrays["wrong"], problem.test[1].tolist()
    images = problem.test[0].numpy().reshape(-1, 8, 8)
    order = np.argsort(outcome.arrays["entropy"], kind="stable")
    ends = {"Least confident": order[::-1][:count], "Most confident": order[:count]}
    faces = [(heading, [_face(outcome, images[i], truth[i], i) for i in chosen.tolist()]) for heading, chosen in ends.items()]
    return f"{int(wrong.sum())} of {len(wrong)} wrong", faces


def _strangers(problem: Digits, outcome: DemoOutcome, count: int = 5) -> tuple[str, Faces]:
    """What it says of the first digits of kinds that it has never seen, and how often it is sure of them."""
    images, truth = problem.strange[0].numpy().reshape(-1, 8, 8), problem.strange[1].tolist()
    sure = outcome.arrays["probs strange"].max(-1) > 0.9
    words = f"sure of {int(sure.sum())} of {len(sure)}, found with a chance of {outcome.values['strange']:.3f}"
    return words, [
        ("The first of them", [_face(outcome, images[i], truth[i], i, " strange") for i in range(min(count, len(truth)))])
    ]


def _strange(outcome: DemoOutcome) -> Shown:
    """Entropies of what it knows, and of what it has never seen."""
    inside, outside = outcome.arrays["entropy"], outcome.arrays["entropy strange"]
    edges = np.linspace(0, float(max(inside.max(), outside.max())), 31).tolist()

    def draw(ax: Any) -> None:
        for values, colour, words in ((inside, "C0", "0 to 7, held out"), (outside, "C1", "8 and 9, never shown")):
            ax.hist(values, bins=edges, density=True, color=colour, alpha=0.55, label=words)
        ax.set(xlabel="entropy of the prediction (nats)", ylabel="density", xlim=(0, edges[-1]))
        ax.legend()

    medians = (
        f"Median entropy {np.median(inside):.2f} of digits of the kinds that were shown, {np.median(outside):.2f} of 8 and 9."
    )
    return shown(draw, outcome.entry.label, "strange", medians, medians, size=(6.5, 3.2))


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
