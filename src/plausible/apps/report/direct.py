"""Findings from a posterior and held-out data in memory, for `plausible.report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plausible.apps.report.collecting import EXAMPLES, Axis, collect
from plausible.apps.report.findings import Findings
from plausible.posteriors.base import Posterior

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
