"""A posterior and held-out data → `Findings`: everything that needs the network is computed here, once."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import plausible
from plausible.analysis import metrics
from plausible.apps.report.findings import NUMBERS, QUANTILES, Findings, Output
from plausible.blocks.chains import convergence
from plausible.core.data import num_rows, take
from plausible.core.serialise import Opaque
from plausible.core.special import double
from plausible.posteriors import diagnostics
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.predictive import Predictive

EXAMPLES = 6
"""How many of the least and of the most certain examples are kept in full."""

EARLY = ("task", "data", "inputs", "method", "network", "likelihood", "prior")
LATE = ("time", "interrupted", "versions")
MANY_OUTPUTS = 12  # more targets than this are judged together
_TRACED, _JUDGED = 4, 50  # inputs whose function values are kept, and whose convergence is looked at
_TRAINING_POINTS = 500  # under a band


class Axis(NamedTuple):
    """The only numeric input: a grid [G] in its units with what the network takes for it, and data to draw."""

    grid: np.ndarray
    inputs: Any
    heldout: np.ndarray
    train: tuple[np.ndarray, np.ndarray] | None = None  # x [n], y [n, targets]


def collect(
    posterior: Posterior,
    x: Any = None,
    y: Any = None,
    *,
    mask: Any = None,
    names: Sequence[str] | None = None,
    classes: Sequence[Sequence[str]] | None = None,
    restore: Callable[[Predictive], Predictive] = lambda predictive: predictive,
    predictive: Predictive | None = None,
    scores: Mapping[str, Any] | None = None,
    rows: Sequence[Any] | None = None,
    cells: Callable[[int], Mapping[str, str]] | None = None,
    axis: Axis | None = None,
    traced: Any = None,
    title: str = "",
    facts: Mapping[str, str] | None = None,
    data: Sequence[tuple[str, str, str]] = (),
    notes: Sequence[str] = (),
) -> Findings:
    """Predict held-out inputs `x` and keep what a report needs to know about them.

    y: targets as the restored predictive has them; x and y None: nothing was held out.
    names, classes: of the targets, and of their classes in the order of the outputs.
    restore: predictions → predictions in the units of y.
    predictive: that of x in the units of y, where it is known already.
    scores: `{"log_likelihood": …, "targets": {name: summary}}` where it is known already.
    rows, cells: what an example is called, and the cells of its row by column.
    axis: the only numeric input, for predictive bands.
    traced: inputs to follow chains at; the held-out ones by default.
    """
    method = f"{posterior.method.name}(…)" if isinstance(posterior.method, Opaque) else repr(posterior.method)
    outputs: tuple[Output, ...] = ()
    total, draws = None, posterior.num_draws(None)
    if x is not None:
        predictive = restore(posterior.predict(x)) if predictive is None else predictive
        draws = predictive.num_draws
        names = list(names) if names is not None else _names(predictive)
        if scores is None:
            each = metrics.summary_by_output(predictive, y, mask=mask) if len(names) > 1 else None
            whole = metrics.summary(predictive, y, mask=mask)
            total = whole.pop("log_likelihood")
            scores = {"log_likelihood": total, "targets": dict(zip(names, each or [whole]))}
        total = float(scores["log_likelihood"])
        outputs = tuple(_outputs(predictive, y, mask, names, classes, scores["targets"], rows, cells))
        if axis is not None and outputs[0].numeric:
            outputs = tuple(_with_bands(outputs, restore(posterior.predict(axis.inputs)), axis))
    diagnostics, traces = _followed(posterior, x if traced is None else traced)
    told = {**_facts(posterior, method), **(facts or {})}
    middle = [name for name in told if name not in EARLY + LATE]
    return Findings(
        title=title or f"{method.partition('(')[0]} posterior",
        facts={name: told[name] for name in (*EARLY, *middle, *LATE) if name in told},
        data=tuple(data),
        notes=tuple(notes),
        outputs=outputs,
        log_likelihood=total,
        history={name: list(map(float, values)) for name, values in posterior.history.items()},
        diagnostics=diagnostics,
        draws=draws,
        traces=traces,
        trained=posterior.model.num_data,
    )


def _names(predictive: Predictive) -> list[str]:
    shape = predictive.likelihood.target_shape((predictive.num_inputs, *predictive.output_shape))[1:]
    if predictive.likelihood.kind == "classes" or prod(shape) == 1:
        return ["y"]
    return [f"y{index}" for index in range(shape[-1])] if len(shape) == 1 and shape[0] <= MANY_OUTPUTS else ["y"]


def _outputs(
    predictive: Predictive,
    y: Any,
    mask: Any,
    names: Sequence[str],
    classes: Sequence[Sequence[str]] | None,
    scores: Mapping[str, Mapping[str, float]],
    rows: Sequence[Any] | None,
    cells: Callable[[int], Mapping[str, str]] | None,
) -> list[Output]:
    """One `Output` per name; targets of any other shape are judged together under the first name."""
    kind = predictive.likelihood.kind
    target, observed = metrics.inputs.predictive_targets(predictive, y, mask)
    seen = observed.numpy()
    if kind in NUMBERS:
        parts = {
            "y": _array(target),
            "mean": _array(predictive.mean),
            "epistemic": _array(predictive.epistemic),
            "aleatoric": _array(predictive.aleatoric),
            "pit": _array(metrics.pit(predictive, y, mask=mask)),
            "quantiles": _array(predictive.quantile(QUANTILES)),
        }
    else:
        parts = {
            "y": target.long().numpy(),
            "probs": _array(metrics.inputs.class_probabilities(predictive)),
            "entropy": _array(predictive.entropy),
            "information": _array(predictive.mutual_information),
        }
    number = np.broadcast_to(np.arange(len(target)).reshape(-1, *[1] * (seen.ndim - 1)), seen.shape)
    outputs = []
    for index, name in enumerate(names):
        pick = (..., index) if len(names) > 1 else ()
        keep = seen[pick].reshape(-1)
        of = number[pick].reshape(-1)[keep]
        arrays = {}
        for part, array in parts.items():
            if part == "probs":
                column = array[(..., index, slice(None))] if len(names) > 1 else array
                arrays[part] = column.reshape(-1, array.shape[-1])[keep]
            elif part == "quantiles":
                arrays[part] = array[pick].reshape(len(QUANTILES), -1)[:, keep]
            else:
                arrays[part] = array[pick].reshape(-1)[keep]
        arrays["rows"] = of.astype(np.int64) if rows is None else np.array([int(rows[i]) for i in of.tolist()], np.int64)
        output = Output(name, kind, _labels(classes, index, arrays, kind), arrays, scores[name])
        if cells is not None:
            output = replace(output, examples={int(i): cells(int(of[i])) for i in output.ends(EXAMPLES)})
        output.check()
        outputs.append(output)
    return outputs


def _labels(
    classes: Sequence[Sequence[str]] | None, index: int, arrays: Mapping[str, np.ndarray], kind: str
) -> tuple[str, ...]:
    if kind in NUMBERS:
        return ()
    width = arrays["probs"].shape[1]
    if classes is None:
        return ("no", "yes") if kind == "binary" else tuple(map(str, range(width)))
    if index >= len(classes) or len(classes[index]) != width:
        raise ValueError(f"classes must name {width} classes for target {index}, got {classes!r}")
    return tuple(map(str, classes[index]))


def _with_bands(outputs: Sequence[Output], predictive: Predictive, axis: Axis) -> list[Output]:
    """The outputs with mean, variances and quantiles on the grid."""
    parts = {
        "mean": predictive.mean,
        "epistemic": predictive.epistemic,
        "aleatoric": predictive.aleatoric,
        "quantiles": predictive.quantile(QUANTILES),
    }
    if len(outputs) == 1 and prod(parts["mean"].shape) != len(axis.grid):
        return list(outputs)  # several outputs judged together have no band
    banded = []
    for index, output in enumerate(outputs):
        band = {"x": axis.grid, "x_heldout": axis.heldout}
        for name, value in parts.items():
            lead = (len(QUANTILES),) if name == "quantiles" else ()
            band[name] = _array(value).reshape(*lead, len(axis.grid), -1)[..., index]
        if axis.train is not None:
            step = max(1, -(-len(axis.train[0]) // _TRAINING_POINTS))
            band["x_train"] = axis.train[0][::step]
            band["y_train"] = axis.train[1].reshape(len(axis.train[0]), -1)[::step, index]
        banded.append(replace(output, band=band))
    return banded


def _followed(posterior: Posterior, x: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Diagnostics of f(x) at some inputs, and the function values of chains there."""
    if x is None:
        return _plain_numbers(posterior.diagnostics()), {}
    inputs = posterior.inputs(x)
    count = num_rows(inputs)
    chosen = torch.linspace(0, count - 1, min(count, _JUDGED)).long().unique()
    some = take(inputs, chosen)
    known = _plain_numbers(posterior.diagnostics(some))
    if not isinstance(posterior, DrawsPosterior) or not posterior.ordered or len(posterior) // posterior.chains < 4:
        return known, {}
    if "rhat" in known and posterior.chains > 1:
        apart = diagnostics.convergence(posterior).get("rhat")
        known |= {} if apart is None else {"rhat_weights": apart}
    values = diagnostics.function_chains(posterior, some)
    chains = values.reshape(*values.shape[:3], -1)  # [chains, draws, inputs, outputs]
    spread = torch.linspace(0, len(chosen) - 1, min(_TRACED, len(chosen))).long().unique()
    flat = double(chains.flatten(2))[0].cpu()
    traces = {"values": _array(chains[:, :, spread, 0]), "inputs": chosen[spread].numpy()}
    if bool(torch.isfinite(flat).all()):
        # R̂ and effective sizes of some 200 quantities say as much as those of all.
        flat = flat[..., :: max(1, flat.shape[-1] // 200)]
        flat = flat[..., (flat.amax((0, 1)) > flat.amin((0, 1)))]
        if flat.shape[-1]:
            traces |= {"rhat": convergence.rhat(flat).numpy(), "ess": convergence.ess_bulk(flat).numpy()}
    statistics = getattr(posterior, "statistics", {})
    if diagnostics.has_momenta(posterior, statistics):
        traces |= {name: statistics[name].numpy() for name in ("energy", "energy_change") if name in statistics}
    return known, traces


def _plain_numbers(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in diagnostics.items() if value is None or isinstance(value, int | float)}


def _facts(posterior: Posterior, method: str) -> dict[str, str]:
    model, run = posterior.model, posterior.run
    count = sum(weight.numel() for weight in model.initial.values())
    taught = sum(model.initial[name].numel() for name in model.random)
    weights = f"{count:,} weights" + ("" if taught == count else f", {taught:,} of them random")
    facts = {
        "method": method,
        "network": f"{type(model.network).__name__}, {weights}",
        "likelihood": str(model.likelihood),
        "prior": str(model.prior),
        "training examples": f"{model.num_data:,}",
    }
    if "seconds" in run:
        steps = f"{run['steps']:,} steps in " if run.get("steps") else ""
        mode = f", {run['mode']}" if run.get("mode") else ""
        facts["time"] = f"{steps}{run['seconds']:.3g} s on {posterior.device.type}{mode}"
    if posterior.interrupted:
        facts["interrupted"] = "yes: the fit was stopped before its planned end"
    versions = f"plausible {plausible.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    return facts | {"versions": versions}


def _array(value: Tensor) -> np.ndarray:
    return double(value.detach())[0].cpu().numpy()


GRID = 200


def findings_of_data(
    posterior: Posterior,
    x: Any,
    y: Any,
    *,
    title: str = "",
    names: Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
    mask: Any = None,
) -> Findings:
    """`collect` with what can be read off the arrays: a band for a single input, cells for up to eight of them."""
    if not isinstance(posterior, Posterior):
        raise TypeError(f"posterior must be a Posterior, as fit returns it, got {type(posterior).__name__}")
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, one per target, got the text {names!r}")
    inputs = posterior.inputs(x)
    table = inputs if isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point() else None
    axis = None
    if table is not None and table.shape[1] == 1 and len(table) > 1:
        low, high = float(table.min()), float(table.max())
        pad = 0.15 * (high - low) or 1.0
        grid = torch.linspace(low - pad, high + pad, GRID, dtype=table.dtype, device=table.device)
        axis = Axis(grid.double().cpu().numpy(), grid[:, None], table[:, 0].double().cpu().numpy())
    nested = [classes] if classes and isinstance(classes[0], str) else classes
    rows = np.zeros((0, 0)) if table is None else table.double().cpu().numpy()
    columns = ["x"] if rows.shape[1] == 1 else [f"x{index}" for index in range(rows.shape[1])]

    def cells(index: int) -> dict[str, str]:
        return {} if table is None else {name: f"{value:.4g}" for name, value in zip(columns[:8], rows[index])}

    shape = "×".join(map(str, inputs.shape[1:])) if isinstance(inputs, Tensor) else "nested"
    return collect(
        posterior,
        x,
        y,
        mask=mask,
        names=_named(posterior, names),
        classes=nested,
        cells=cells,
        axis=axis,
        title=title,
        facts={"inputs": f"{shape or 'one number'} for each example"},
    )


def _named(posterior: Posterior, names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    model = posterior.model
    shape = model.likelihood.target_shape((1, *model.output_shape))[1:]
    wanted = shape[-1] if shape and model.likelihood.kind != "classes" else 1
    if len(names) != wanted:
        raise ValueError(f"names must hold {wanted} name{'s' if wanted > 1 else ''}, one per target, got {list(names)!r}")
    return [str(name) for name in names]


def as_pictures(images: Any, count: int) -> np.ndarray:
    """Pictures in [0, 1], scaled over all of them: [N, H, W], or [N, H, W, 3] in colour."""
    values = torch.as_tensor(images).detach().cpu().float()
    if values.ndim == 4 and values.shape[1] in (1, 3):
        values = values.movedim(1, -1)
    if values.ndim == 4 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim not in (3, 4) or (values.ndim == 4 and values.shape[-1] != 3) or len(values) != count:
        raise ValueError(
            f"images must be [N, H, W], [N, 3, H, W] or [N, H, W, 3] with N = {count}, got {list(torch.as_tensor(images).shape)}"
        )
    low, high = float(values.min()), float(values.max())
    return ((values - low) / ((high - low) or 1.0)).numpy()


def pictures(findings: Findings, images: Any, count: int) -> dict[int, np.ndarray]:
    """The pictures of those of `count` inputs that are shown as examples: row → [H, W] or [H, W, 3]."""
    scaled = as_pictures(images, count)
    rows = {int(output.arrays["rows"][index]) for output in findings.outputs for index in output.ends(EXAMPLES)}
    return {row: scaled[row] for row in rows}
