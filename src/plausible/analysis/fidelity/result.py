"""What a comparison found: numbers with their standard errors and the noise floor, as a table, as text, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from plausible.core.tables import Table, Tabular
from plausible.core.words import plural


@dataclass(frozen=True)
class Measure:
    """One number: `value`, the Monte Carlo standard error `error`, and `floor`, what two halves of the reference score.

    `error` says what other draws of the same two posteriors would change; it is 0 where nothing is drawn. A value that there is
    not is NaN, and `note` says why. `ideal` is that of a posterior with the reference's law: 0, or 1 for agreement and ratios.
    """

    value: float
    error: float = 0.0
    floor: float | None = None
    ideal: float = 0.0
    note: str = ""

    @classmethod
    def missing(cls, why: str, ideal: float = 0.0) -> Measure:
        return cls(math.nan, ideal=ideal, note=why)

    @property
    def at_floor(self) -> bool | None:
        """Whether it cannot be told from another run of the reference: no farther from `ideal` than `floor` plus two errors."""
        if math.isnan(self.value) or self.floor is None or math.isnan(self.floor):
            return None
        return abs(self.value - self.ideal) <= abs(self.floor - self.ideal) + 2 * self.error

    def text(self, digits: int = 3) -> str:
        """`0.132 ± 0.004`."""
        if math.isnan(self.value):
            return "–"
        error = f" ± {_shown(self.error, digits - 1)}" if self.error else ""
        return _shown(self.value, digits) + error


@dataclass(frozen=True)
class Region:
    """Mean epistemic variance over the `inputs` of a region, of both posteriors, and their `ratio` (below 1: too sure)."""

    inputs: int
    posterior: float
    reference: float
    ratio: Measure

    @property
    def difference(self) -> float:
        """Posterior − reference, in the squared units of y."""
        return self.posterior - self.reference


WORDS = {
    "agreement": "same most probable class, share of the inputs",
    "total_variation": "total variation of predictions, 0 to 1",
    "wasserstein": "Wasserstein-2 of f(x), in standard deviations of the reference",
    "stein": "kernel Stein discrepancy of the weights, 1: a point at a mode",
    "log_likelihood": "held-out log-likelihood less the reference's, nats a row",
}


@dataclass(frozen=True)
class Fidelity(Tabular):
    """How near a posterior is to a reference: see `plausible.fidelity.fidelity` for what each number means."""

    agreement: Measure
    total_variation: Measure
    wasserstein: Measure
    stein: Measure
    log_likelihood: Measure
    epistemic: Mapping[str, Region] = field(default_factory=dict)
    inputs: int = 0
    draws: int | None = None
    reference_draws: int | None = None
    posterior: str = ""
    reference: str = ""

    @property
    def measures(self) -> dict[str, Measure]:
        """All of them by name; ratios of epistemic variances as `epistemic.inside` and so on."""
        measures = {name: getattr(self, name) for name in WORDS}
        return measures | {f"epistemic.{name}": region.ratio for name, region in self.epistemic.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not there is None."""
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fidelity:
        """The inverse of `to_dict`."""
        fields = dict(data)
        for name in WORDS:
            fields[name] = _measure(fields[name])
        fields["epistemic"] = {
            name: Region(**{**region, "ratio": _measure(region["ratio"])}) for name, region in fields["epistemic"].items()
        }
        return cls(**fields)

    def as_table(self) -> Table:
        counts = ["closed form" if n is None else plural(n, "draw") for n in (self.draws, self.reference_draws)]
        words = WORDS | {f"epistemic.{name}": f"epistemic variance over the reference's, {name}" for name in self.epistemic}
        rows = []
        for name, measure in self.measures.items():
            floor = "" if measure.floor is None else _shown(measure.floor, 3)
            note = measure.note or ("as near as the reference to itself" if measure.at_floor else "")
            rows.append((words[name], measure.text(), floor, note))
        title = f"{self.posterior} ({counts[0]}) against {self.reference} ({counts[1]}), {self.inputs:,} inputs"
        heads = ("measure", "value", "noise floor", "")
        return Table(heads, rows, title, words=("measure", ""))


def _shown(value: float, digits: int) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.{digits}g}".replace("-", "−") if abs(value) < 1e4 else f"{value:.1e}".replace("-", "−")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measure(plain: Mapping[str, Any]) -> Measure:
    return Measure(**{**plain, "value": math.nan if plain["value"] is None else plain["value"]})
