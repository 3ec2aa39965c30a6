"""What a report is made from: held-out predictions and targets, history and diagnostics, as plain arrays and JSON.

`evidence.json` (format-versioned, with checksums) names `evidence.safetensors`. Neither needs the data, the network or
the method to be read, and nothing in them is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
RECORD, TENSORS = "evidence.json", "evidence.safetensors"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The levels of stored predictive quantiles: the median, the 50 % and the 90 % interval."""

NUMBERS, CLASSES = ("continuous", "counts"), ("classes", "binary")
_NEEDED = {
    "numbers": {"y": 1, "mean": 1, "epistemic": 1, "aleatoric": 1, "pit": 1, "quantiles": 2, "rows": 1},
    "classes": {"y": 1, "probs": 2, "entropy": 1, "information": 1, "rows": 1},
}


@dataclass(frozen=True)
class Output:
    """One target over M held-out examples.

    kind: that of the likelihood, `continuous`, `counts`, `classes` or `binary`.
    arrays: numbers: `y`, `mean`, `epistemic`, `aleatoric` (variances), `pit` [M], `quantiles` [5, M]. Classes: `y`
        (codes), `entropy`, `information` (nats) [M], `probs` [M, C]. Both: `rows` [M], what an example is called.
        Empty where no prediction was stored.
    metrics: scores by the names of `plausible.metrics.summary`.
    band: `x`, `mean`, `epistemic`, `aleatoric` [G], `quantiles` [5, G] on a grid of the only numeric input, with
        `x_heldout` [M] and `x_train`, `y_train`; empty elsewhere.
    examples: what the least and most certain examples look like: index → the cells of its row by column.
    """

    name: str
    kind: str
    classes: tuple[str, ...] = ()
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    band: Mapping[str, np.ndarray] = field(default_factory=dict)
    examples: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    @property
    def numeric(self) -> bool:
        return self.kind in NUMBERS

    @property
    def count(self) -> int:
        """M, how many examples were held out."""
        return len(self.arrays["y"]) if self.arrays else 0

    @property
    def uncertainty(self) -> np.ndarray:
        """The standard deviation, or 1 − max p; [M]."""
        if self.numeric:
            return np.sqrt(self.arrays["epistemic"] + self.arrays["aleatoric"])
        return 1 - self.arrays["probs"].max(-1)

    @property
    def losses(self) -> np.ndarray:
        """Squared error of the mean, or 0 and 1 for right and wrong; [M]."""
        if self.numeric:
            return (self.arrays["mean"] - self.arrays["y"]) ** 2
        return (self.arrays["probs"].argmax(-1) != self.arrays["y"]).astype(np.float64)

    @property
    def ordered(self) -> np.ndarray:
        """Indices from the most to the least certain example, by entropy for classes; [M]."""
        return np.argsort(self.uncertainty if self.numeric else self.arrays["entropy"], kind="stable")

    def ends(self, count: int) -> list[int]:
        """The indices of the most certain examples, then of the least certain ones, the least certain first."""
        order = self.ordered.tolist()
        return [*order[:count], *order[::-1][:count]]

    def check(self) -> None:
        """Refuse arrays that do not fit together."""
        if self.kind not in NUMBERS + CLASSES:
            raise ValueError(f"target {self.name!r} is of an unknown kind {self.kind!r}")
        for name, axes in _NEEDED["numbers" if self.numeric else "classes"].items() if self.arrays else ():
            array = self.arrays.get(name)
            examples = None if array is None else array.shape[-1] if name == "quantiles" else array.shape[0]
            if array is None or array.ndim != axes or examples != self.count or self.count == 0:
                raise ValueError(f"target {self.name!r} has no usable {name!r}")
        if self.arrays and not self.numeric and self.arrays["probs"].shape[1] != len(self.classes):
            raise ValueError(f"target {self.name!r} has probabilities that do not fit its classes")


@dataclass(frozen=True)
class Effect:
    """What a column does to the predictions: the 5 % quantile, the mean and the 95 % quantile over the draws.

    kind: `number`, `date` (in years) or `category`, whose `labels` are its values.
    arrays: `x` [G], `effect` [3, outputs, G], `importance` [3].
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Findings:
    """Everything a report shows.

    title: what the page is called.
    facts: headings of the part "what was fitted", each with words.
    data: rows of the data summary: (name, role, what it is).
    notes: lines about decisions made while reading the data.
    outputs: the targets; empty where nothing was held out.
    log_likelihood: mean log density of a held-out row, all targets together.
    history: mean of each logged term per epoch.
    diagnostics: that of the posterior, on function values.
    draws: how many draws predictions average; None where it is not known.
    traces: `values` [chains, draws, Q], function values at Q inputs, `rhat` and `ess` of each of R quantities [R].
    effects: those of the columns of a table, the most important first.
    trained: rows that the weights were trained on, to which `history` belongs; None where it is not known.
    """

    title: str
    facts: Mapping[str, str]
    data: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    log_likelihood: float | None = None
    history: Mapping[str, list[float]] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    draws: int | None = None
    traces: Mapping[str, np.ndarray] = field(default_factory=dict)
    effects: tuple[Effect, ...] = ()
    trained: int | None = None

    def write(self, folder: Path) -> None:
        """Write both files into a folder, the JSON last."""
        import torch

        from plausible.core.storage import write_json, write_tensors
        from plausible.engine.checkpoint import plain

        named: dict[str, np.ndarray] = {f"traces/{name}": array for name, array in self.traces.items()}
        for index, output in enumerate(self.outputs):
            named |= {f"{index}/{name}": array for name, array in output.arrays.items()}
            named |= {f"{index}/band/{name}": array for name, array in output.band.items()}
        named |= {f"effects/{k}/{name}": part for k, effect in enumerate(self.effects) for name, part in effect.arrays.items()}
        # The JSON is written last, with the checksum of the tensors: without it the folder has no findings.
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in named.items()}
        outputs = [{k: v for k, v in vars(output).items() if k not in ("arrays", "band")} for output in self.outputs]
        content = {"format": FORMAT} | {k: v for k, v in vars(self).items() if k != "traces"} | {"outputs": outputs}
        content["effects"] = [{k: v for k, v in vars(effect).items() if k != "arrays"} for effect in self.effects]
        content["tensors_sha256"] = write_tensors(folder / TENSORS, tensors)
        write_json(folder / RECORD, plain(content))

    @classmethod
    def read(cls, folder: Path) -> Findings:
        """The inverse of `write`; damaged, incomplete or newer files are a ValueError."""
        from plausible.core.storage import read_json, read_tensors

        where = folder / RECORD
        content = read_json(where)
        if (written := content.get("format")) != FORMAT:
            known = f"has format {written!r}, this version of plausible reads format {FORMAT}"
            raise ValueError(f"{where} {known}; fit again or use the version that wrote it")
        tensors = read_tensors(folder / TENSORS, str(content.get("tensors_sha256")))
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        try:
            outputs = []
            for index, entry in enumerate(content["outputs"]):
                output = Output(
                    str(entry["name"]),
                    str(entry["kind"]),
                    tuple(map(str, entry["classes"])),
                    _below(arrays, f"{index}/"),
                    _numbers(entry["metrics"]),
                    _below(arrays, f"{index}/band/"),
                    {int(row): {str(k): str(v) for k, v in cells.items()} for row, cells in entry["examples"].items()},
                )
                output.check()
                outputs.append(output)
            effects = tuple(
                Effect(str(e["name"]), str(e["kind"]), tuple(map(str, e["labels"])), _below(arrays, f"effects/{index}/"))
                for index, e in enumerate(content.get("effects", ()))
            )
            total, draws, trained = content["log_likelihood"], content["draws"], content.get("trained")
            return cls(
                title=str(content["title"]),
                facts={str(k): str(v) for k, v in content["facts"].items()},
                data=tuple((str(a), str(b), str(c)) for a, b, c in content["data"]),
                notes=tuple(map(str, content["notes"])),
                outputs=tuple(outputs),
                log_likelihood=None if total is None else float(total),
                history={str(k): [float(v) for v in values] for k, values in content["history"].items()},
                diagnostics=_numbers(content["diagnostics"]),
                draws=None if draws is None else int(draws),
                traces=_below(arrays, "traces/"),
                effects=effects,
                trained=None if trained is None else int(trained),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error


def _below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The arrays whose name continues `prefix` by one word."""
    parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return {name: array for name, array in parts.items() if "/" not in name}


def _numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON numbers, with infinities and NaN, which are written as words, as floats again."""
    return {str(key): value if value is None or isinstance(value, int) else float(value) for key, value in content.items()}
