"""What each column does to the predictions, with bands over the draws: its partial dependence, and how much it matters.

    effect of v:  E_rows f_s(x with the column set to v)
    importance:   √(½ E_rows (f_s(x) − f_s(x with the column of another row))²)

The first is Friedman's partial dependence (2001) of each draw f_s; the second the total effect of Sobol by Jansen's estimator
(1999), in the units of the target, so that effects through interactions count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plausible.apps.dates import in_years
from plausible.apps.report.findings import Effect
from plausible.apps.tables import Categories, Dates, Encoder

if TYPE_CHECKING:
    from plausible.apps.preparing import Prepared
    from plausible.posteriors.base import Posterior

ROWS, DRAWS = 100, 50
GRID = 20
MOST = 60
"""Columns beyond which nothing is computed: a page would show none of it."""


def effects(posterior: Posterior, data: Prepared) -> tuple[Effect, ...]:
    """One for each column, the most important first; empty where there are too many columns."""
    encoders = data.preprocessor.columns
    if len(encoders) > MOST:
        return ()
    shuffle = np.random.default_rng(0)
    inputs = data.inputs[0]
    rows = inputs[np.sort(shuffle.permutation(len(inputs))[:ROWS])]
    others = rows[shuffle.permutation(len(rows))]
    asked, places = [rows], []
    start = 0
    for encoder in encoders:
        columns = slice(start, start + len(encoder.features))
        start = columns.stop
        x, labels, blocks = _values(encoder, inputs[:, columns])
        asked += [_with(rows, columns, others[:, columns]), *(_with(rows, columns, block) for block in blocks)]
        places.append((encoder, x, labels, len(blocks)))
    # one call, so that every answer is that of the same functions
    answers = _answers(posterior, data, np.concatenate(asked)).reshape(-1, len(asked), len(rows), _width(data))
    found, at = [], 1
    for encoder, x, labels, count in places:
        moved = answers[:, at] - answers[:, 0]
        importance = np.sqrt(0.5 * (moved**2).mean(axis=(1, 2)))
        curves = answers[:, at + 1 : at + 1 + count].mean(axis=2).transpose(0, 2, 1)  # [draws, outputs, values]
        found.append(
            Effect(encoder.name, _kind(encoder), labels, {"x": x, "effect": _band(curves), "importance": _band(importance)})
        )
        at += 1 + count
    return tuple(sorted(found, key=lambda effect: -float(effect.arrays["importance"][1])))


def _with(rows: np.ndarray, columns: slice, block: np.ndarray) -> np.ndarray:
    changed = rows.copy()
    changed[:, columns] = block
    return changed


def _values(encoder: Encoder, seen: np.ndarray) -> tuple[np.ndarray, tuple[str, ...], list[np.ndarray]]:
    """Values that occurred, evenly spaced by their ranks: on an axis [G], in words, and as inputs."""
    if isinstance(encoder, Categories):
        counts = seen.sum(axis=0)
        chosen = np.sort(np.argsort(-counts, kind="stable")[:GRID])
        labels = [name.removeprefix(f"{encoder.name}=") for name in encoder.features]
        blocks = np.eye(len(labels), dtype=seen.dtype)[chosen]
        return chosen.astype(np.float64), tuple(labels[index] for index in chosen), list(blocks)
    present = seen[seen[:, -1] == 0] if encoder.indicator else seen
    order = present[np.argsort(present[:, 0], kind="stable")]
    picked = order[np.unique(np.linspace(0, len(order) - 1, GRID).round().astype(int))]
    picked = picked[np.unique(picked[:, 0], return_index=True)[1]]
    x = picked[:, 0].astype(np.float64) * encoder.std + encoder.mean
    return (in_years(x) if isinstance(encoder, Dates) else x), (), list(picked)


def _kind(encoder: Encoder) -> str:
    return "category" if isinstance(encoder, Categories) else "date" if isinstance(encoder, Dates) else "number"


def _width(data: Prepared) -> int:
    target = data.target
    return len(target.classes[0]) if target.likelihood == "categorical" else len(target.names)


def _answers(posterior: Posterior, data: Prepared, inputs: np.ndarray) -> np.ndarray:
    """What each draw says: probabilities of classes, else the location (of counts the mean) in units of the target; [S, N, K]."""
    outputs = posterior.functions(torch.from_numpy(inputs), draws=_draws(posterior)).double().cpu()
    kind, target = posterior.likelihood.kind, data.target
    if kind == "classes":
        return outputs.softmax(-1).numpy()
    if kind == "binary":
        return outputs.sigmoid().numpy()
    located = outputs[..., : len(target.names)]
    if kind == "counts":
        return located.exp().numpy()
    return located.numpy() * np.array(target.scale or (1.0,)) + np.array(target.loc or (0.0,))


def _draws(posterior: Posterior) -> int | None:
    every: Any = posterior.num_draws(None)
    return min(DRAWS, every) if every else DRAWS


def _band(values: np.ndarray | Sequence[float]) -> np.ndarray:
    """The 5 % quantile, the mean and the 95 % quantile over the draws, which stand on the first axis."""
    array = np.asarray(values, dtype=np.float64)
    return np.stack([np.quantile(array, 0.05, axis=0), array.mean(axis=0), np.quantile(array, 0.95, axis=0)])
