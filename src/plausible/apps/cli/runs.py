"""The folder of a run: `posterior/`, `run.json` (everything prediction needs), `metrics.json` and `heldout.csv`, and
`evidence.json` with `evidence.safetensors` (everything a report needs).

It is written beside its place and renamed when it is complete, so `run/` is either absent, whole, or the one that was
there before. While a fit is under way its checkpoint lives in the sibling `run.checkpoint/`, removed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plausible.apps.responses import Response
from plausible.apps.tables import Preprocessor, mlp

if TYPE_CHECKING:
    from torch import nn

    from plausible.apps.report.findings import Findings
    from plausible.posteriors.base import Posterior

FORMAT = 1
RECORD = "run.json"


def checkpoint_folder(out: Path) -> Path:
    """Where the checkpoint of an unfinished run lives: `run/` → `run.checkpoint/`."""
    return out.with_name(f"{out.name}.checkpoint")


def prepare(out: Path, *, overwrite: bool, resume: bool, inputs: Path) -> None:
    """Refuse an output folder that cannot or should not be written, before any work is done."""
    if out == Path.cwd() or out == Path.home() or out.parent == out:
        raise ValueError(f"--out {out} would replace that folder; name a new one, such as --out run")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"--out {out} exists and is not empty; choose another folder or add --overwrite")
        if not (out / RECORD).is_file():
            raise ValueError(f"--out {out} is not a run of plausible (it has no {RECORD}), so it is not overwritten")
        if inputs.resolve().is_relative_to(out):
            raise ValueError(f"--overwrite would delete {inputs}, which is inside --out {out}; choose another folder")
    checkpoint = checkpoint_folder(out)
    if checkpoint.exists() and not resume and not overwrite:
        raise ValueError(f"{checkpoint} holds an unfinished run; add --resume to go on with it or --overwrite to start again")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {(error.strerror or str(error)).lower()}") from error


def discard_checkpoint(out: Path, *, unless_useful: bool = False) -> None:
    """Remove the checkpoint of a run; `unless_useful` only one that holds no state yet."""
    folder = checkpoint_folder(out)
    if not (unless_useful and (folder / "checkpoint.json").exists()):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Record:
    """What `run.json` says: how to turn a table into inputs, build the network, and read its outputs."""

    preprocessor: Preprocessor
    target: Response
    hidden: tuple[int, ...]
    activation: str
    method: str
    settings: Mapping[str, Any]
    rows: Mapping[str, int]
    seed: int
    version: str

    @property
    def layers(self) -> tuple[int, ...]:
        return (len(self.preprocessor.features), *self.hidden, self.target.outputs)

    def network(self) -> nn.Sequential:
        return mlp(len(self.preprocessor.features), self.hidden, self.target.outputs, self.activation)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "plausible": self.version,
            "task": self.target.task,
            "target": self.target.to_dict(),
            "preprocessor": self.preprocessor.to_dict(),
            "network": {
                "inputs": self.preprocessor.features,
                "hidden": list(self.hidden),
                "outputs": self.target.outputs,
                "activation": self.activation,
            },
            "method": self.method,
            "settings": dict(self.settings),
            "rows": dict(self.rows),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: Path) -> Record:
        """The inverse of `to_dict`; anything else is a ValueError."""
        if data.get("format") != FORMAT:
            raise ValueError(
                f"{where} has format {data.get('format')!r}, this version of plausible reads format {FORMAT}; "
                f"it was written by plausible {data.get('plausible', 'of unknown version')}"
            )
        try:
            return cls(
                preprocessor=Preprocessor.from_dict(data["preprocessor"]),
                target=Response.from_dict(data["target"]),
                hidden=tuple(int(width) for width in data["network"]["hidden"]),
                activation=str(data["network"]["activation"]),
                method=str(data["method"]),
                settings=dict(data["settings"]),
                rows=dict(data["rows"]),
                seed=int(data["seed"]),
                version=str(data["plausible"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error


def write(
    out: Path,
    record: Record,
    posterior: Posterior,
    metrics: Mapping[str, Any] | None,
    heldout: Mapping[str, Any],
    evidence: Findings,
) -> None:
    """Write the folder beside its place, then put it there in one rename."""
    from plausible.apps.files import write_table
    from plausible.core.storage import beside, write_json

    # A folder cannot be renamed onto one that is not empty: the old run steps aside first, and goes last.
    new, old = beside(out), beside(out)
    new.mkdir()
    try:
        posterior.save(new / "posterior")
        write_json(new / RECORD, record.to_dict())
        if metrics is not None:
            write_json(new / "metrics.json", dict(metrics))
        if heldout:
            write_table(new / "heldout.csv", heldout)
        evidence.write(new)
        if out.exists():
            out.rename(old)
        new.rename(out)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    discard_checkpoint(out)


def read_record(folder: Path) -> Record:
    from plausible.core.storage import read_json

    if not folder.is_dir():
        unfinished = checkpoint_folder(folder.resolve()).exists()
        hint = "; its fit has not finished: run the same fit again with --resume" if unfinished else ""
        raise ValueError(f"{folder} is not a folder; a run written by `plausible fit` was expected{hint}")
    if not (folder / RECORD).is_file():
        raise ValueError(f"{folder} is not a run of plausible: it has no {RECORD}; make one with `plausible fit`")
    return Record.from_dict(read_json(folder / RECORD), folder / RECORD)


def load(folder: Path, device: str = "cpu") -> tuple[Record, Posterior]:
    """A run's record and posterior, on a device (`auto`: the best there is)."""
    import plausible
    from plausible.core.networks import choose_device

    record = read_record(folder)
    network = record.network()
    return record, plausible.load(folder / "posterior", network).to(choose_device(network, device))
