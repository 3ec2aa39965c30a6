"""Size and error of pruned posteriors as a table; what is pruned, and by what, is said in `plausible.posteriors.pruning`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plausible.analysis import metrics
from plausible.core import weights as tree
from plausible.core.networks import Where
from plausible.core.tables import Table, Tabular, data_frame
from plausible.posteriors.base import Posterior
from plausible.posteriors.predictive import Predictive
from plausible.posteriors.pruning import CRITERIA, Criterion, check_fraction, means, prune, scores

__all__ = ["CRITERIA", "FRACTIONS", "Criterion", "PruningTable", "Row", "means", "prune", "scores", "table"]

FRACTIONS = (0.0, 0.5, 0.75, 0.95, 0.98)
"""Those of Blundell et al. (2015), Table 2."""


@dataclass(frozen=True)
class Row:
    """One pruned posterior: weights and bytes of one network (of each chain or part), and its scores where there are data.

    weights: how many could be pruned, kept: how many of them are left. dense_bytes: all parameters of the network as they are.
    sparse_bytes: with only the kept ones of a pruned tensor and where they stand, a bit for each weight or four bytes for each
    kept one, whichever is less, and no more than dense. error: the share of wrong answers, for classes; rmse: for numbers;
    nll: the mean negative log-likelihood of a target, in nats.
    """

    by: str
    fraction: float
    weights: int
    kept: int
    dense_bytes: int
    sparse_bytes: int
    error: float | None = None
    rmse: float | None = None
    nll: float | None = None


@dataclass(frozen=True)
class PruningTable(Tabular):
    """Rows by criterion and fraction; `print` shows them with the criteria side by side."""

    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows]}

    def to_pandas(self) -> Any:
        """A data frame with the fields of `Row`; needs pandas."""
        return data_frame([asdict(row) for row in self.rows])

    def as_table(self) -> Table:
        criteria = list(dict.fromkeys(row.by for row in self.rows))
        measured = [score for score in ("error", "rmse", "nll") if getattr(self.rows[0], score) is not None]
        several = len(criteria) > 1
        words = {"error": "error", "rmse": "RMSE", "nll": "NLL (nats)"}
        scored = [f"{words[score]} by {by}" if several else words[score] for score in measured for by in criteria]
        heads = ("pruned" if several else f"pruned by {criteria[0]}", "weights left", "dense", "sparse", *scored)
        lines = []
        for fraction in dict.fromkeys(row.fraction for row in self.rows):
            rows = {row.by: row for row in self.rows if row.fraction == fraction}
            first = rows[criteria[0]]
            cells = [_number(score, getattr(rows[by], score)) for score in measured for by in criteria]
            sizes = [_bytes(first.dense_bytes), _bytes(first.sparse_bytes)]
            lines.append([f"{100 * fraction:.4g} %", first.kept, *sizes, *cells])
        return Table(heads, lines)


def table(
    posterior: Posterior,
    fractions: Sequence[float] = FRACTIONS,
    *,
    x: Any = None,
    y: Any = None,
    by: Criterion | Sequence[Criterion] = "snr",
    where: Where = None,
    per_layer: bool = False,
    draws: int | None = None,
    seed: int = 0,
    mask: Any = None,
    restore: Callable[[Predictive], Predictive] = lambda predictive: predictive,
) -> PruningTable:
    """Size, and with held-out inputs `x` and targets `y` the error, of a posterior pruned by each fraction.

    by: one criterion, or several to compare. where, per_layer: as in `prune`. draws, seed: of the predictions, the same for every
    row. mask: boolean, shaped like y, True where a target was observed. restore: predictions → predictions in the units of y.
    Cost: a prediction of x for each row.
    """
    criteria: tuple[Any, ...] = (by,) if isinstance(by, str) else tuple(by)
    if not criteria or not len(fractions):
        raise ValueError("table needs at least one fraction and one criterion, got none")
    if (x is None) != (y is None):
        raise ValueError(f"give x and y together: {'x' if x is None else 'y'} is missing")
    for fraction in fractions:
        check_fraction("fractions", fraction)

    def measured(pruned: Posterior) -> dict[str, float]:
        predictive = restore(pruned.predict(x, draws, seed))
        if metrics.inputs.probability_kind(predictive):
            wrong = {"error": 1 - metrics.accuracy(predictive, y, mask=mask)}
        else:
            wrong = {"rmse": metrics.rmse(predictive, y, mask=mask)}
        return wrong | {"nll": metrics.log_loss(predictive, y, mask=mask)}

    rows: list[Row] = []
    for fraction in fractions:
        # Nothing pruned is the same by every criterion, so its prediction is made once.
        whole: dict[str, float] | None = None
        for criterion in criteria:
            pruned = prune(posterior, fraction, by=criterion, where=where, per_layer=per_layer)
            measures = {} if x is None else whole or measured(pruned)
            whole = measures if fraction == 0 else None
            weights, kept, dense, sparse = _sizes(pruned)
            rows.append(Row(criterion, float(fraction), weights, kept, dense, sparse, **measures))
    return PruningTable(tuple(rows))


def _sizes(posterior: Posterior) -> tuple[int, int, int, int]:
    """Weights that could be pruned, those kept, and the bytes of one network, dense and sparse; the mean over chains or parts."""
    model, masks = posterior.model, posterior.masks
    parameters = dict(model.network.named_parameters())
    dense = tree.num_bytes(parameters)
    weights, kept, saved = 0, 0.0, 0.0
    for name, mask in masks.items():
        count, size = parameters[name].numel(), parameters[name].element_size()
        left = count * float(mask.double().mean())
        weights, kept = weights + count, kept + left
        # Kept weights are stored with a bit mask or with their indices, whichever is less; a tensor that gains nothing stays dense.
        saved += max(0.0, count * size - left * size - min(math.ceil(count / 8), 4 * left))
    return weights, round(kept), dense, round(dense - saved)


def _bytes(count: int) -> str:
    power = min(3, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _number(score: str, value: float) -> str:
    return f"{100 * value:.2f} %" if score == "error" else f"{value:.4g}"
