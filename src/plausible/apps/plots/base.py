"""What all plots share: figures and axes to draw on, chains to draw, and one output to look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plausible.posteriors.base import Posterior
from plausible.posteriors.drawing import axes_of, column
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7.0, 4.2), **options: Any) -> tuple[Figure, Any]:
    """A figure that belongs to no window, and its axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figures need matplotlib ({error}): pip install 'plausible[plot]'") from error
    # Not pyplot's: such a figure would stay in memory, and might want a display.
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure: Figure, path: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write the figure as PNG and SVG, the same bytes each time."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


__all__ = ["DASHED", "axes_of", "chains_of", "chosen_quantity", "column", "named_chains", "new_figure", "save_figure"]

DASHED: dict[str, Any] = {"color": "0.5", "linestyle": (0, (4, 3)), "linewidth": 1}
"""How a line is drawn to which others are compared."""


def chains_of(draws: Any, x: Any = None) -> np.ndarray:
    """Draws in chains, [chains, draws, quantities]: an array [chains, draws] or with quantities, or f(x) of a posterior."""
    if isinstance(draws, Posterior):
        if not isinstance(draws, DrawsPosterior):
            raise TypeError(f"a {type(draws).__name__} has no chains to draw: it does not keep draws in their order")
        if x is None:
            raise ValueError("x is missing: the inputs at which the posterior's functions are looked at")
        each = len(draws) // draws.chains
        values = draws.functions(x).reshape(len(draws), -1)[: each * draws.chains]
        values = values.reshape(each, draws.chains, -1).transpose(0, 1)
    else:
        values = torch.as_tensor(np.asarray(draws.detach().cpu() if isinstance(draws, Tensor) else draws))
        values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or 0 in values.shape:
        shapes = "[chains, draws] or [chains, draws, quantities]"
        raise ValueError(f"draws must be a posterior or an array {shapes}, got {list(values.shape)}")
    return values.detach().cpu().double().numpy()


def named_chains(draws: Any, x: Any = None, names: Any = None) -> tuple[np.ndarray, list[str]]:
    """Draws in chains [chains, draws, quantities] and what each is called: f(x), weights that match `names`, or an array."""
    if isinstance(draws, Posterior):
        from plausible.blocks.chains.convergence import LIMIT
        from plausible.posteriors.diagnostics import quantities, stored

        drawn, words = quantities(stored(draws), x, names, LIMIT)
        return drawn.detach().cpu().double().numpy(), words
    values = chains_of(draws)
    return values, ["value"] if values.shape[2] == 1 else [f"quantity {q}" for q in range(values.shape[2])]


def chosen_quantity(values: np.ndarray, quantity: int) -> np.ndarray:
    """[chains, draws] of one quantity."""
    if not -values.shape[2] <= quantity < values.shape[2]:
        raise ValueError(f"quantity={quantity} is not one of the {values.shape[2]} quantities")
    return values[:, :, quantity]
