"""The page of `plausible demo`: one HTML file with everything embedded, for light, dark and small screens.

The light plots also lie beside it as PNG files. Every number comes from the run.
"""

from __future__ import annotations

import html
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import plausible
from plausible.apps.cli import demo
from plausible.apps.cli.demo_plots import Plots, bands, entropies, faces, reliability
from plausible.apps.report.style import STYLE

if TYPE_CHECKING:
    from plausible.apps.cli.demo import Outcome, Problem


def write(folder: Path, results: Sequence[tuple[Problem, list[Outcome]]], *, seed: int, quick: bool, began: float) -> None:
    """Draw everything and write `index.html`."""
    plots = Plots(folder)
    (curve, curve_outcomes), (digits, digit_outcomes) = results
    good = [outcome for outcome in curve_outcomes if not outcome.error]
    fine = [outcome for outcome in digit_outcomes if not outcome.error]
    slots = {
        "style": STYLE,
        "rough": "<p class='note'>A quick run: too few steps for the numbers to mean much.</p>" if quick else "",
        "curve_table": _table(curve, curve_outcomes),
        "curve_bands": _bands(plots, curve, good),
        "digit_table": _table(digits, digit_outcomes),
        "digit_faces": _grid(_faces(plots, digits, outcome) for outcome in fine),
        "digit_entropies": _entropies(plots, fine),
        "digit_reliability": _grid((_reliability(plots, digits, outcome) for outcome in fine), "narrow"),
        "train_digits": f"{len(digits.train[1]):,}",
        "test_digits": f"{len(digits.test[1]):,}",
        "methods": _methods(results),
        "made": f"plausible {plausible.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}, "
        f"seed {seed}, {time.perf_counter() - began:.0f} s in all",
    }
    page = TEMPLATE
    for name, text in slots.items():
        page = page.replace(f"[[{name}]]", text)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _grid(figures: Any, kind: str = "") -> str:
    shown = "".join(figures)
    return f'<div class="grid {kind}">{shown}</div>' if shown else "<p class='note'>No method gave a result.</p>"


def _figure(picture: str, name: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption><b>{html.escape(name)}</b> {html.escape(caption)}</figcaption></figure>"


def _bands(plots: Plots, problem: Problem, outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return _grid(())
    heights = [outcome.arrays["quantiles"] for outcome in outcomes] + [problem.train[1].numpy()]
    low, high = min(float(h.min()) for h in heights), max(float(h.max()) for h in heights)
    low, high = max(low, -5.0), min(high, 5.0)
    limits = low - 0.12 * (high - low), high + 0.15 * (high - low)
    top = max(float(max(o.arrays["epistemic"].max(), o.arrays["aleatoric"].max())) for o in outcomes)
    figures = []
    for outcome in outcomes:
        near, gap = outcome.values["epistemic_data"], outcome.values["epistemic_gap"]
        caption = f"epistemic std {near:.2f} at the data, {gap:.2f} in the gap"
        alt = f"Predictions of {outcome.entry.label} with 50 % and 90 % bands over 60 data points; {caption}."
        draw = bands(problem, outcome, limits, 1.45 * min(top, 2.0))
        figures.append(
            _figure(plots.picture(f"regression-{outcome.entry.key}", (4.5, 3.8), draw, alt), outcome.entry.label, caption)
        )
    return _grid(figures)


def _faces(plots: Plots, problem: Problem, outcome: Outcome) -> str:
    draw, words = faces(problem, outcome)
    alt = f"Digits about which {outcome.entry.label} is {words}."
    caption = f"{int(outcome.arrays['wrong'].sum())} of {len(outcome.arrays['wrong'])} wrong"
    return _figure(plots.picture(f"digits-{outcome.entry.key}", (5, 3.65), draw, alt), outcome.entry.label, caption)


def _entropies(plots: Plots, outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return _grid(())
    medians = []
    for outcome in outcomes:
        values, wrong = outcome.arrays["entropy"], outcome.arrays["wrong"]
        both = [f"{np.median(values[rows]):.2f}" if rows.any() else "none" for rows in (~wrong, wrong)]
        medians.append(f"{outcome.entry.label} {both[0]} and {both[1]}")
    alt = f"Entropy of right and wrong answers. Medians, right and wrong: {'; '.join(medians)}."
    picture = plots.picture("entropy", (5.2, 1.1 + 0.5 * len(outcomes)), entropies(outcomes), alt)
    caption = f"Median entropy of right and of wrong answers: {'; '.join(medians)}."
    return f'<figure class="single">{picture}<figcaption>{html.escape(caption)}</figcaption></figure>'


def _reliability(plots: Plots, problem: Problem, outcome: Outcome) -> str:
    draw, words = reliability(problem, outcome)
    alt = f"Reliability of {outcome.entry.label}: {words}."
    caption = f"calibration error {outcome.values['ece']:.3f}"
    return _figure(plots.picture(f"reliability-{outcome.entry.key}", (2.9, 2.9), draw, alt), outcome.entry.label, caption)


def _table(problem: Problem, outcomes: Sequence[Outcome]) -> str:
    heads = "".join(f'<th scope="col">{html.escape(c.heading).replace(chr(10), "<br>")}</th>' for c in problem.columns)
    rows = []
    for outcome in outcomes:
        if outcome.error:
            filled = f'<td class="failed" colspan="{len(problem.columns)}">failed: {html.escape(outcome.error)}</td>'
        else:
            filled = "".join(f"<td>{text}</td>" for text in demo.cells(problem, outcome))
        rows.append(f'<tr><th scope="row">{html.escape(outcome.entry.label)}</th>{filled}</tr>')
    head = f'<thead><tr><th scope="col">method</th>{heads}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _methods(results: Sequence[tuple[Problem, list[Outcome]]]) -> str:
    (_, first), (_, second) = results
    parts = []
    for one, two in zip(first, second):
        settings = "".join(
            f"<dd>{place}: <code>{html.escape(str(outcome.entry.method))}</code></dd>"
            for place, outcome in (("curve", one), ("digits", two))
        )
        about = html.escape(one.entry.about)
        parts.append(f"<dt>{html.escape(one.entry.label)}</dt><dd>{about}</dd>{settings}")
    return f"<dl>{''.join(parts)}</dl>"


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>plausible: what a network knows, and what it does not</title>
<style>[[style]]</style>
</head>
<body>
<main>
<h1>What a network knows, and what it does not</h1>
<p>An ordinary neural network gives one answer, whether it has seen a thousand similar cases or none. A Bayesian one keeps many
networks that all fit the data. Where they agree, the answer is well supported by the data; where they disagree, the data do not
settle it. This page shows that on two small problems, each solved by a method of each family in the library. All numbers come
from the run that wrote it.</p>
[[rough]]

<h2>A curve with a gap</h2>
<p>Sixty noisy points lie on both sides of a gap. A small network learns the curve and how noisy it is, and is then tested on 400
new points, half of them in the gap, where it has seen nothing.</p>
[[curve_table]]
<p class="note">Log-likelihood (log-lik., in nats for each point): how much probability the prediction gave to what then happened,
higher is better. RMSE: typical error of the mean, lower is better. In 90 %: the share of new points inside the 90 % interval;
it should be near 90 %, less is overconfident, more is overcautious. Time includes the fit that a method starts from.</p>
<h3>Do the bands widen where there are no data?</h3>
<p>The line is the mean prediction; half of all new points should fall into the dark band and nine tenths into the light one. The
strip below takes the uncertainty apart: the dotted line is noise, which more data would not remove; the filled part is
<em>epistemic</em>, the disagreement between the networks, which more data would remove. It should be small at the data and grow
in the gap and beyond the ends. MAP has one network and nobody to disagree with, so its filled part is zero everywhere.</p>
[[curve_bands]]

<h2>Handwritten digits</h2>
<p>The images have 8 × 8 pixels; a small network learns from [[train_digits]] of them and is tested on [[test_digits]] others.</p>
[[digit_table]]
<p class="note">Log-likelihood: in nats for each image, higher is better. Error rate: share of wrong answers. Calibration error:
how far stated probability and share of right answers lie apart on average, 0 is best. Errors found: the chance that a wrong
answer has a higher entropy than a right one; 1 would sort all errors out, 0.5 is guessing. With few errors this number is
rough.</p>
<h3>Which digits is it unsure about?</h3>
<p>The test images with the highest and the lowest entropy. Above each is the predicted digit with its probability; below it MI,
the mutual information in nats: the part of the uncertainty that comes from disagreement between networks (zero for a single one).
Wrong answers are coloured, with the true digit.</p>
[[digit_faces]]
<h3>Is it less sure when it is wrong?</h3>
<p>Entropy measures how spread out a prediction is: 0 is certain, 2.3 means that all ten digits seem equally likely. The thick bar
holds the middle half of the right answers, the thin line the middle 90 %; each dot is a wrong answer. Dots far to the right are
errors that could have been sent to a person; dots at the left are confident errors.</p>
[[digit_entropies]]
<h3>Can the probabilities be taken at their word?</h3>
<p>Test images are grouped by the probability of the predicted digit. Of those called with 80 %, 80 % should be right: points on
the dashed line. Points above it are too cautious, points below it too sure. The bars are 90 % confidence intervals for the share,
and the number at the bottom is how many images the group has. Most groups are small.</p>
[[digit_reliability]]

<h2>What to do next</h2>
<p>Try it on a table of your own; a CSV file with a header line is enough. Columns may be numbers or text.</p>
<pre><code>plausible fit data.csv --target price --method ensemble --out run
plausible predict run new.csv --out predictions.csv
plausible methods</code></pre>
<p>Or with your own PyTorch network:</p>
<pre><code>import plausible as pl

posterior = pl.fit(network, (x, y), pl.Ensemble(members=5))
prediction = posterior.predict(x_new)
prediction.mean, prediction.std, prediction.epistemic, prediction.interval(0.9)</code></pre>
<p>No method wins everywhere. An ensemble is a simple one to start with; compare by held-out log-likelihood and by whether the
intervals hold what they promise.</p>

<h2>How this was made</h2>
<p>Both networks have one hidden layer (50 tanh units, 64 ReLU units) and a standard normal prior on every weight. The settings
were chosen on other draws of the curve and by validation inside the training digits; tables of seed 0 were seen along
the way, so take small differences for what they are. Both SGLD rows
start from a fit that is already good, as their descriptions say; such short walks describe its surroundings rather than the
whole posterior.</p>
<details>
<summary>Methods and settings</summary>
[[methods]]
</details>
<footer>[[made]]</footer>
</main>
</body>
</html>
"""
