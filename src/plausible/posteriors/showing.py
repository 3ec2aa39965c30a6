"""Predictions and posteriors as people look at them: as named columns, and as HTML in notebooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.core import weights as tree
from plausible.core.likelihoods import Likelihood, Scaled
from plausible.core.tables import Table, html
from plausible.core.words import number, plural

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior
    from plausible.posteriors.predictive import Predictive

SHOWN = 8
"""Rows of predictions that a notebook shows."""
WIDE = 12
"""Columns that it shows."""


def columns(
    predictive: Predictive, level: float, names: Sequence[str] | None = None, classes: Sequence[Any] | None = None
) -> dict[str, list[Any]]:
    """Predictions as named columns, each beginning with the name of its target where there are several.

    Numbers: mean, std, epistemic, aleatoric, lower, upper, where std² = epistemic + aleatoric. Classes: prediction,
    p_<class>, entropy, mutual_information (nats). `classes` are the labels, or lists of them for each target.
    """
    named: dict[str, list[Any]] = {}
    if predictive.likelihood.kind in ("classes", "binary"):
        probs = predictive.probs.cpu()
        # a yes/no target has one probability, and two classes
        probs = torch.stack([1 - probs, probs], -1) if predictive.likelihood.kind == "binary" else probs
        parts = {"entropy": predictive.entropy, "mutual_information": predictive.mutual_information}
        prefixes = _prefixes(probs.shape[1:-1], names)
        for place, (prefix, labels) in enumerate(zip(prefixes, _labels(classes, len(prefixes), probs.shape[-1]))):
            each = probs.flatten(1, -2)[:, place] if probs.ndim > 2 else probs
            named[f"{prefix}prediction"] = [labels[code] for code in each.argmax(-1).tolist()]
            named |= {f"{prefix}p_{label}": each[:, code].tolist() for code, label in enumerate(labels)}
            named |= {prefix + name: _column(value, place) for name, value in parts.items()}
        return named
    parts = {name: getattr(predictive, name) for name in ("mean", "std", "epistemic", "aleatoric")}
    parts["lower"], parts["upper"] = predictive.interval(level)
    for place, prefix in enumerate(_prefixes(predictive.mean.shape[1:], names)):
        named |= {prefix + name: _column(value, place) for name, value in parts.items()}
    return named


def _column(values: Tensor, place: int) -> list[Any]:
    return values.reshape(len(values), -1)[:, place].cpu().tolist()


def _labels(classes: Sequence[Any] | None, targets: int, count: int) -> Sequence[Sequence[Any]]:
    """The labels of each target; one list for all, a list of lists, or None for their numbers."""
    if classes is None:
        return [range(count)] * targets
    each = [classes] * targets if isinstance(classes[0], str) or not isinstance(classes[0], Sequence) else classes
    if len(each) != targets or any(len(labels) != count for labels in each):
        wanted = f"{plural(count, 'label')}" + (f" for each of {targets} targets" if targets > 1 else "")
        raise ValueError(f"classes must be {wanted}, in the order of the outputs, got {classes!r}")
    return each


def _prefixes(shape: Sequence[int], names: Sequence[str] | None) -> list[str]:
    """What the columns of each target begin with: nothing where there is one."""
    places = list(product(*map(range, shape)))
    if names is None:
        names = [f"y{'_'.join(map(str, place))}" for place in places]
    if len(names) != len(places):
        raise ValueError(f"names has {plural(len(names), 'name')} for {plural(len(places), 'target')}")
    return [f"{name}_" for name in names] if len(places) > 1 else [""]


def predictive_html(predictive: Predictive) -> str:
    """The first predictions as a table for a notebook."""
    of_classes = predictive.likelihood.kind in ("classes", "binary")
    found = columns(predictive.first(SHOWN), 0.9)
    if of_classes:
        found = found if len(found) <= WIDE else {k: v for k, v in found.items() if "p_" not in k}
    heads = list(found)[:WIDE]
    left = len(predictive) - SHOWN
    notes = [f"and {plural(left, 'more row')}"] if left > 0 else []
    notes += [f"{plural(len(found) - WIDE, 'more column')}"] if len(found) > WIDE else []
    notes += [
        "entropy and mutual information in nats" if of_classes else "lower and upper: 90 % interval",
        "to_pandas() has all",
    ]
    title = f"{type(predictive).__name__}: {plural(len(predictive), 'input')}, {plural(predictive.num_draws, 'draw')}"
    rows = [[str(row), *(found[head][row] for head in heads)] for row in range(min(SHOWN, len(predictive)))]
    return html(Table(("", *heads), rows, f"{title}, {_in_short(predictive.likelihood)}", note="; ".join(notes)).html())


def posterior_html(posterior: Posterior) -> str:
    """What it is and where it comes from, with settings and weights to be unfolded, for a notebook."""
    model, run = posterior.model, posterior.run
    count = tree.num_elements(tree.select(model.initial, model.random))
    facts: dict[str, Any] = {
        "random weights": count,
        "examples": model.num_data,
        "likelihood": _in_short(model.likelihood),
        "prior": str(model.prior),
        "draws": getattr(posterior, "store", None) and posterior.num_draws(None),
        "chains": getattr(posterior, "chains", None),
        "parts": len(posterior.parts) or None,
        "log evidence": posterior.log_evidence,
        "fitted in": run.get("seconds") and f"{number(run['seconds'])} s, {run.get('steps', 0):,} steps, {run.get('mode', '')}",
        "chosen because": run.get("choice"),
        "interrupted": "by Ctrl-C, before the end of the run" if posterior.interrupted else None,
    }
    rows = [(name, value) for name, value in facts.items() if value not in (None, "")]
    table = Table(("", ""), rows, f"{type(posterior).__name__} by {posterior.method_name}", words=("",))
    folded = {"settings of the method": _settings(posterior.method), "weights": posterior.summary()}
    return html(table.html(), *(f"<details><summary>{k}</summary>{v.html()}</details>" for k, v in folded.items() if len(v)))


def _settings(method: Any) -> Table:
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    rows = [(field.name, str(getattr(method, field.name))) for field in fields]
    return Table(("", ""), rows, words=("",))


def _in_short(likelihood: Likelihood) -> str:
    return f"{likelihood.likelihood} of standardised targets" if isinstance(likelihood, Scaled) else str(likelihood)
