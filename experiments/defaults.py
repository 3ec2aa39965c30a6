"""Every method at its defaults, and the chosen one, on small public tables beside linear models, Gaussian processes and trees.

Inputs are standardised by the training rows; targets are given to every method in the units of the file. Our methods get one
hidden layer of 50 tanh units and nothing else. Scores are those of the test rows: negative log-likelihood and CRPS in standard
deviations of the training targets (classes: nats and Brier scores), coverage of central 90 % intervals, seconds of fit and
prediction. One split of each: of UCI's sets the first published one, of others random with a fifth of the rows for the test.
Of tables with many rows (`LARGE`) the methods of `MAIN` alone are fitted, of the others all but the slowest (`SLOW`).

What our defaults are was decided on the sets of `CHOSEN_ON` alone. The others are scored once, for the page.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from experiments import rivals
from experiments.frame import Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size
from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.tables import mlp
from plausible.engine.method import create
from plausible.fitting import fit
from plausible.posteriors.doubts import FitWarning

REGRESSION = {
    "boston": "uci",
    "concrete": "uci",
    "energy": "uci",
    "kin8nm": "uci",
    "naval": "uci",
    "power": "uci",
    "protein": "uci",
    "wine": "uci",
    "yacht": "uci",
    "airquality": "small",
    "auto_fuel": "small",
    "mcycle": "small",
    "nlschools": "small",
    "ozone": "small",
    "robot_arm": "small",
    "diabetes": "sklearn",
    "few": "few",
}
CLASSES = {
    "iris": "sklearn",
    "wines": "sklearn",
    "breast_cancer": "sklearn",
    "digits": "sklearn",
    "neal_binary": "small",
    "neal_classes": "small",
}
CHOSEN_ON = ("boston", "kin8nm", "wine", "yacht", "mcycle", "ozone", "diabetes", "few", "iris", "breast_cancer", "neal_classes")
"""The half on which defaults were decided; `few` are 54 rows of boston."""
SLOW = (
    "nuts",
    "chees",
    "smc",
    "ais",
    "parallel-tempering",
    "mile",
    "flow",
    "multiplicative-flow",
    "full-rank",
    "vogn",
    "refined",
    "subspace",
)
LARGE = ("kin8nm", "naval", "power", "protein", "wine", "energy", "nlschools", "digits")
MAIN = ("auto", "map", "ensemble", "laplace", "mean-field", "ivon", "sgld")
LEVEL = 0.9


class Rows(NamedTuple):
    """Standardised inputs, and targets as they are: `[N, 1]` numbers, or `[N]` classes."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def classes(self) -> bool:
        return self.y.dtype.kind == "i"


def rows(name: str, split: int) -> Rows:
    """Split number `split` of a table."""
    kind = REGRESSION.get(name) or CLASSES[name]
    if kind == "uci":
        pairs = datasets.uci(name).split(split)
        x, y, test_x, test_y = (part.double().numpy() for part in (*pairs.train, *pairs.test))
    else:
        whole_x, whole_y = _whole(name, kind, split)
        order = np.random.default_rng(split).permutation(len(whole_x))
        held = max(1, round(0.2 * len(order)))
        train, test = order[held:], order[:held]
        x, y, test_x, test_y = whole_x[train], whole_y[train], whole_x[test], whole_y[test]
    if y.dtype.kind == "f":
        y, test_y = y.reshape(len(y), -1)[:, :1], test_y.reshape(len(test_y), -1)[:, :1]
    loc, scale = x.mean(0), x.std(0)
    scale[scale == 0] = 1.0
    return Rows((x - loc) / scale, y, (test_x - loc) / scale, test_y)


def _whole(name: str, kind: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    if kind == "few":
        table = datasets.uci("boston")
        chosen = np.random.default_rng(1000 + split).permutation(len(table.x))[:54]
        return table.x[chosen].double().numpy(), table.y[chosen].double().numpy()
    if kind == "small":
        table = datasets.small(name)
        y = table.y.numpy() if not table.y.is_floating_point() else table.y.double().numpy()
        return table.x.double().numpy(), y
    from sklearn import datasets as public

    load = {
        "diabetes": public.load_diabetes,
        "iris": public.load_iris,
        "wines": public.load_wine,
        "breast_cancer": public.load_breast_cancer,
        "digits": public.load_digits,
    }[name]
    found = load()
    return found.data.astype(float), found.target.astype(float if name == "diabetes" else np.int64)


@dataclass(frozen=True)
class Table:
    """Candidates on the first splits of a table; `time` is the budget of the chosen method, in seconds."""

    name: str
    candidates: tuple[str, ...]
    splits: int = 1
    time: float | None = None


def run(settings: Table, request: Request) -> dict[str, Any]:
    """Scores of every candidate on every split; what failed is stored in words."""
    found: dict[str, list[Any]] = {}
    for split in range(settings.splits):
        given = rows(settings.name, split)
        for candidate in settings.candidates:
            began = time.perf_counter()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    if candidate in rivals.ALL:
                        scores = _of_rival(candidate, given, split)
                    else:
                        scores = _of_method(candidate, given, split, settings, request)
                except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
                    scores = {"failed": f"{type(error).__name__}: {error}"[:300]}
            warned = [str(one.message)[:200] for one in said if issubclass(one.category, FitWarning)]
            found.setdefault(candidate, []).append({**scores, "seconds": time.perf_counter() - began, "warned": warned})
    first = rows(settings.name, 0)
    return {"scores": found, "rows": len(first.x), "test_rows": len(first.test_x), "inputs": first.x.shape[1]}


def _of_method(name: str, given: Rows, split: int, settings: Table, request: Request) -> dict[str, Any]:
    x, test_x = (torch.from_numpy(part).float() for part in (given.x, given.test_x))
    y, test_y = torch.from_numpy(given.y), torch.from_numpy(given.test_y)
    outputs = int(y.max()) + 1 if given.classes else y.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(split)
        network = mlp(x.shape[1], (50,), outputs, "tanh")
    budget = {"time": settings.time} if name == "auto" and settings.time is not None else {}
    posterior = fit(network, (x, y), create(name, **budget), seed=split, device="cpu", progress=False, compile=request.compile)
    predictive = posterior.predict(test_x)
    scores = metrics.summary(predictive, test_y, level=LEVEL)
    kept = {"method": posterior.method.name, "choice": posterior.run.get("choice", "")}
    if given.classes:
        return {**kept, "nll": -scores["log_likelihood"], "score": scores["brier"], "error": 1 - scores["accuracy"]}
    scale = float(y.double().std(correction=0))
    numbers = {
        "nll": -scores["log_likelihood"] - math.log(scale),
        "score": scores["crps"] / scale,
        "error": scores["rmse"] / scale,
    }
    return {**kept, **numbers, "coverage": scores["coverage_90"]}


def _of_rival(name: str, given: Rows, split: int) -> dict[str, Any]:
    if given.classes:
        probs = rivals.CLASSES[name](given.x, given.y, given.test_x, split)
        picked = np.clip(probs[np.arange(len(given.test_y)), given.test_y], 1e-12, 1)
        truth = np.eye(probs.shape[1])[given.test_y]
        return {
            "nll": float(-np.log(picked).mean()),
            "score": float(((probs - truth) ** 2).sum(1).mean()),
            "error": float((probs.argmax(1) != given.test_y).mean()),
        }
    y, test_y = given.y[:, 0], given.test_y[:, 0]
    scale, loc = y.std(), y.mean()
    mean, std = rivals.REGRESSION[name](given.x, (y - loc) / scale, given.test_x, split)
    return rivals.gaussian_scores(mean, std, (test_y - loc) / scale, LEVEL)


# ---------------------------------------------------------------------------------------------------------------------
# What the results say


def means(results: Results, tables: Sequence[str], key: str) -> dict[str, dict[str, float]]:
    """Means over splits by table and candidate; a candidate that failed on a split has none."""
    found: dict[str, dict[str, float]] = {}
    for table in tables:
        if table not in results:
            continue
        for candidate, splits in results[table]["scores"].items():
            values = [one.get(key) for one in splits]
            if values and all(isinstance(value, int | float) and math.isfinite(value) for value in values):
                found.setdefault(table, {})[candidate] = float(np.mean(values))
    return found


def ranks(results: Results, tables: Sequence[str], among: Sequence[str] | None = None) -> dict[str, tuple[float, float, int]]:
    """Mean rank of the NLL over tables with its standard error, and the number of tables; failures rank last."""
    nll = means(results, tables, "nll")
    each: dict[str, list[float]] = {}
    for table in nll:
        there = [name for name in results[table]["scores"] if among is None or name in among]
        values = np.array([nll[table].get(name, math.inf) for name in there])
        for name, value in zip(there, values):
            each.setdefault(name, []).append(1 + (values < value).sum() + 0.5 * ((values == value).sum() - 1))
    return {
        name: (
            float(np.mean(found)),
            float(np.std(found, ddof=1) / len(found) ** 0.5) if len(found) > 1 else math.nan,
            len(found),
        )
        for name, found in each.items()
    }


def _number(value: float | None, form: str = ".2f") -> str:
    if value is None:
        return "–"
    text = f"{value:{form}}" if abs(value) < 1000 else f"{value:.1e}"
    return text.replace("-", "−")


def sheets(tables: Sequence[str], kind: Literal["regression", "classes"]) -> Callable[[Results], Sequence[Sheet]]:
    """Ranks of those that ran on every table, and the scores of all."""

    def made(results: Results) -> list[Sheet]:
        there = [table for table in tables if table in results]
        everywhere = [c for c in (*MAIN, *rivals.ALL) if all(c in results[table]["scores"] for table in there)]
        ranked = sorted(ranks(results, there, everywhere).items(), key=lambda pair: pair[1][0])
        coverage = means(results, there, "coverage")
        seconds = means(results, there, "seconds")

        def over(numbers: Mapping[str, Mapping[str, float]], name: str) -> float | None:
            values = [own[name] for own in numbers.values() if name in own]
            return float(np.mean(values)) if values else None

        head = ("", "mean rank of NLL", "± s.e.", *(["coverage of 90 %", "least"] if kind == "regression" else []), "seconds")
        body = []
        for name, (rank, error, _) in ranked:
            least = min((own[name] for own in coverage.values() if name in own), default=None)
            extra = [_number(over(coverage, name)), _number(least)] if kind == "regression" else []
            body.append((name, _number(rank, ".1f"), _number(error, ".1f"), *extra, _number(over(seconds, name), ".1f")))
        found = [Sheet(f"{kind}: mean ranks over {len(there)} tables", head, tuple(body))]
        for key, title in (
            ("nll", "NLL"),
            ("score", "CRPS" if kind == "regression" else "Brier score"),
            ("coverage", "coverage of 90 %"),
        ):
            numbers = means(results, there, key)
            if not numbers:
                continue
            names = [name for table in there for name in results[table]["scores"]]
            lines = tuple(
                (name, *(_number(numbers.get(table, {}).get(name)) for table in there)) for name in dict.fromkeys(names)
            )
            found.append(Sheet(f"{kind}: {title}", ("", *there), lines))
        return found

    return made


def best_rank(tables: Sequence[str]) -> Callable[[Results], Sequence[float] | None]:
    """How far the mean rank of the chosen method is behind the best of the others: below 0 it leads."""

    def values(results: Results) -> Sequence[float] | None:
        there = [table for table in tables if table in results]
        everywhere = [c for c in (*MAIN, *rivals.ALL) if all(c in results[table]["scores"] for table in there)]
        found = ranks(results, there, everywhere) if there else {}
        others = [rank for name, (rank, _, _) in found.items() if name != "auto"]
        return [found["auto"][0] - min(others)] if "auto" in found and others else None

    return values


def covered(tables: Sequence[str], worst: bool = False) -> Callable[[Results], Sequence[float] | None]:
    """Coverage of the chosen method by table, or its least on a table of 100 test rows and more."""

    def values(results: Results) -> Sequence[float] | None:
        found = [
            100 * own["auto"]
            for table, own in means(results, tables, "coverage").items()
            if "auto" in own and (not worst or results[table]["test_rows"] >= 100)
        ]
        return ([min(found)] if worst else found) if found else None

    return values


def unwarned(tables: Sequence[str], ours: Sequence[str]) -> Callable[[Results], Sequence[float] | None]:
    """How often a method of ours was more than 0.1 nat worse than the constant and said nothing."""

    def values(results: Results) -> Sequence[float] | None:
        count, seen = 0, False
        for table in tables:
            scores = results[table]["scores"] if table in results else {}
            for split, constant in enumerate(scores.get("constant", [])):
                for name in ours:
                    if name in scores and "nll" in (own := scores[name][split]):
                        seen = True
                        count += own["nll"] > constant["nll"] + 0.1 and not own["warned"]
        return [float(count)] if seen else None

    return values


def build() -> Reproduction:
    """A cell for each table; one part for the half that defaults were chosen on, and one for the other, of each kind."""
    from plausible.methods import registry

    every = ("auto", *(name for name in registry if name != "auto"))
    quick = tuple(name for name in every if name not in SLOW)
    cells, parts = [], []
    for kind, tables, others in (("regression", REGRESSION, rivals.REGRESSION), ("classes", CLASSES, rivals.CLASSES)):
        for name in tables:
            large = name in LARGE
            ours = MAIN if large else quick
            few = ("auto", "map", "ensemble", "laplace", "mean-field")
            settings = {
                "full": Table(name, (*ours, *others), splits=1),
                "reduced": Table(name, (*few, *(other for other in others if "process" not in other)), time=20.0),
                "tiny": Table(name, ("auto", "map", "constant"), time=1.0),
            }
            small = name in ("diabetes", "few", "iris")
            cells.append(Cell(name, run, {s: t for s, t in settings.items() if s == "full" or small}))  # type: ignore[misc]
        for half in ("chosen on", "reported once"):
            own = [name for name in tables if (name in CHOSEN_ON) == (half == "chosen on")]
            needed: dict[Size, Sequence[str]] = {
                "full": own,
                "reduced": [n for n in own if n in ("diabetes", "few", "iris")],
                "tiny": [n for n in own if n in ("few", "iris")],
            }
            claims = [Bound("mean rank of NLL, less the best of the others", best_rank(own), high=0.0, unit="")]
            if kind == "regression":
                claims.append(Bound("coverage of 90 % intervals, mean over tables", covered(own), low=85, high=95))
                claims.append(Bound("least coverage on 100 test rows", covered(own, worst=True), low=75))
            claims.append(
                Bound("fits of ours 0.1 nat worse than the constant without a warning", unwarned(own, every), high=0, unit="")
            )
            by_size: dict[Size, Sequence[Any]] = {"full": claims}
            parts.append(
                Part("table", f"{kind}-{half.replace(' ', '-')}", f"{kind}: tables {half}", needed, by_size, sheets(own, kind))  # type: ignore[arg-type]
            )
    return Reproduction(
        "defaults",
        "Every method at its defaults on small tables",
        "Tables of UCI (Hernández-Lobato & Adams 2015), the classical literature and scikit-learn.",
        tuple(cells),
        tuple(parts),
        "defaults",
        {"full": 1, "reduced": 1, "tiny": 1},
    )


REPRODUCTIONS = {"defaults": build()}
