"""Logistic regression by SGLD, with and without control variates: the Stein discrepancy by step size (Nemeth & Fearnhead 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Effect, Part, Reproduction, Request, Result, Results, Sheet, Size, look
from plausible.apps.compare.tables import mean
from plausible.core.likelihoods import Bernoulli
from plausible.core.priors import Gaussian
from plausible.core.storage import MemoryDraws
from plausible.fitting import fit
from plausible.methods import MAP, SGLD, Ensemble
from plausible.posteriors.diagnostics import stein_discrepancies
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
"""Step sizes, as shares of 4/λ_max, above which full batches are unstable at the mode."""
CORRELATION, SCALE = 0.4, 10**0.5


@dataclass(frozen=True)
class Regression:
    """Rows, inputs, batches of one per cent, steps, and what reduces their noise."""

    control: Literal["start", "svrg"] | None
    rows: int = 100_000
    inputs: int = 10
    steps: int = 100_000
    kept: int = 1000
    shares: tuple[float, ...] = SHARES

    @property
    def batch(self) -> int:
        return self.rows // 100


def data(settings: Regression) -> tuple[Tensor, Tensor]:
    """Inputs with correlations 0.4^|i − j|, and classes by a coefficient vector from N(0, I)."""
    stream = torch.Generator().manual_seed(0)
    places = torch.arange(settings.inputs).float()
    root = torch.linalg.cholesky(CORRELATION ** (places[:, None] - places).abs())
    x = torch.randn(settings.rows, settings.inputs, generator=stream) @ root.T
    truth = torch.randn(settings.inputs, 1, generator=stream)
    return x, torch.bernoulli(torch.sigmoid(x @ truth), generator=stream)


def curvature(x: Tensor, mode: Tensor) -> Tensor:
    """The Hessian of −log p(w, D) at the mode: [D, D]."""
    chance = torch.sigmoid(x @ mode.T)
    return (x.T @ (chance * (1 - chance) * x)).double() + torch.eye(x.shape[1], dtype=torch.float64) / SCALE**2


def run(settings: Regression, request: Request) -> dict[str, Any]:
    """For each step size and seed: discrepancy, effective draws and the variance over that of the Laplace approximation.

    All chains start at the mode. One kernel for all: its length is the size of the posterior, √(2 tr Λ⁻¹).
    """
    x, y = data(settings)
    shared: dict[str, Any] = {"likelihood": Bernoulli(), "prior": Gaussian(SCALE), "device": "cpu", "progress": False}
    net = nn.Linear(settings.inputs, 1, bias=False)
    start = fit(net, (x, y), MAP(epochs=60, lr=0.02, patience=None), compile=False, **shared)
    precision = curvature(x, start.weights()["weight"][0])
    length = float((2 * torch.linalg.inv(precision).trace()).sqrt())
    limit = 4 / float(torch.linalg.eigvalsh(precision)[-1])
    found: dict[str, list[list[float]]] = {"stein": [], "effective": [], "variance": []}
    epochs = settings.steps * settings.batch // settings.rows
    for share in settings.shares:
        chain = SGLD(
            epochs,
            settings.batch,
            share * limit,
            burn_in=0.1,
            thin=settings.steps * 9 // 10 // settings.kept,
            control=settings.control,
        )
        several: Any = fit(
            net,
            (x, y),
            Ensemble(chain, request.seeds, init="given"),
            init=start,
            seed=request.seed,
            compile=request.compile,
            **shared,
        )
        draws = several.weights()["weight"]
        chains = [
            DrawsPosterior(chain, several.model, several.run, MemoryDraws({"weight": draws[k :: request.seeds]}))
            for k in range(request.seeds)
        ]
        found["stein"].append(list(stein_discrepancies(chains, (x, y), length=length)))
        found["effective"].append([float(each.diagnostics()["ess_bulk"]) for each in chains])
        root = torch.linalg.cholesky(precision)
        spread = [(each.weights()["weight"].squeeze(1).double() @ root).var(0).mean() for each in chains]
        found["variance"].append([float(value) for value in spread])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

WORDS = {"plain": "SGLD", "start": "with the mode as anchor", "svrg": "with SVRG"}


def shares(row: Result) -> Sequence[float]:
    """The step sizes of a cell."""
    return row["settings"].get("shares", SHARES)


def least(cell: str) -> Any:
    """The smallest discrepancy of each seed, over the step sizes."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, cell, "stein")
        return None if found is None else [min(column) for column in zip(*found)]

    return values


def misled(cell: str) -> Any:
    """The discrepancy at the step of the most effective draws over the smallest, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        stein, effective = look(results, cell, "stein"), look(results, cell, "effective")
        if stein is None:
            return None
        most = [max(range(len(effective)), key=lambda i: column[i]) for column in zip(*effective)]
        return [stein[i][k] / min(row[k] for row in stein) for k, i in enumerate(most)]

    return values


def less(cell: str) -> Any:
    """Log of the smallest discrepancy of this cell over that of plain SGLD."""

    def values(results: Results) -> Sequence[float] | None:
        own, plain = least(cell)(results), least("plain")(results)
        return None if own is None or plain is None else [float(torch.tensor(a / b).log()) for a, b in zip(own, plain)]

    return values


def claims(size: Size) -> list[Bound | Effect]:
    """Control variates lower the least discrepancy; effective draws choose a step with a larger one."""
    few = size == "tiny"
    found: list[Bound | Effect] = [
        Effect(f"log of the least discrepancy, {WORDS[cell]}, less that of SGLD", less(cell), -1, "lower", "nats")
        for cell in ("start", "svrg")
    ]
    found += [
        Bound(
            f"discrepancy at the step with the most effective draws, over the least: {WORDS[cell]}",
            misled(cell),
            "above 1",
            low=None if few else 1.2,
            unit="×",
        )
        for cell in WORDS
    ]
    return found


def sheets(results: Results) -> list[Sheet]:
    """Each chain at each step size."""
    found = []
    for cell, words in WORDS.items():
        if (row := results.get(cell)) is not None:
            body = [
                (
                    f"{share:g}",
                    mean(row["stein"][i]).text(3),
                    mean(row["effective"][i]).text(0),
                    mean(row["variance"][i]).text(2),
                )
                for i, share in enumerate(shares(row))
            ]
            heads = ("ε·λ_max/4", "Stein discrepancy", "effective draws", "variance over Laplace's")
            found.append(Sheet(words, heads, tuple(body)))
    return found


def draw(results: Results) -> Figure:
    """The discrepancy and the effective draws by step size."""
    figure, axes = figures.new(1, 2, (9.5, 3.8))
    for number, (cell, words) in enumerate(WORDS.items()):
        if (row := results.get(cell)) is None:
            continue
        for ax, key in zip(axes, ("stein", "effective")):
            ax.loglog(shares(row), [mean(values).value for values in row[key]], "o-", color=f"C{number}", label=words)
    for ax, words in zip(axes, ("Stein discrepancy", "effective draws of the worst weight")):
        ax.set(xlabel="step size, share of the largest stable one", ylabel=words)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def sizes(control: Literal["start", "svrg"] | None) -> dict[Size, Regression]:
    """As published, a tenth of it, and next to nothing."""
    full = Regression(control)
    return {
        "full": full,
        "reduced": replace(full, rows=10_000, steps=10_000, kept=500),
        "tiny": replace(full, rows=200, steps=100, kept=20, shares=(0.1, 0.6)),
    }


EVERY: dict[Size, Sequence[str]] = {size: tuple(WORDS) for size in SIZES}
CONTROLS: dict[str, Literal["start", "svrg"] | None] = {"plain": None, "start": "start", "svrg": "svrg"}
REPRODUCTIONS = {
    "control-variates": Reproduction(
        "control-variates",
        "Control variates and step sizes: logistic regression by SGLD",
        "Stochastic Gradient Markov Chain Monte Carlo. Christopher Nemeth and Paul Fearnhead. Journal of the American Statistical "
        "Association 116, 2021.",
        tuple(Cell(name, run, sizes(control)) for name, control in CONTROLS.items()),
        (
            Part("table", "1", "Stein discrepancy by step size", EVERY, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "steps", "Discrepancy and effective draws by step size", EVERY, draw=draw),
        ),
        "control-variates",
    )
}
