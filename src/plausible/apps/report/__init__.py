"""The report: one self-contained HTML page about a fit and its held-out predictions.

`write` makes it from the folder of a run, `html` from a posterior and held-out data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plausible.posteriors.base import Posterior

__all__ = ["html", "write"]

FILE = "report.html"


def write(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run that `plausible fit` left, to `run/report.html` or `out`; returns where it is.

    Needs no data and no network: the fit stored its held-out predictions, history and diagnostics. An existing report is
    replaced, as it is derived from the run. ValueError for a folder that is not a run, a damaged file, or a place that
    cannot be written.
    """
    from plausible.apps.report.runs import findings_of
    from plausible.apps.report.sections import page

    folder = Path(run)
    path = folder / FILE if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"out={str(path)!r} is a folder; name a file, such as {str(path / FILE)!r}")
    return _put(path, page(findings_of(folder)))


def html(
    posterior: Posterior,
    x: Any,
    y: Any,
    *,
    out: str | Path | None = None,
    title: str = "",
    names: Sequence[str] | None = None,
    classes: Sequence[str] | Sequence[Sequence[str]] | None = None,
    mask: Any = None,
    images: Any = None,
) -> str:
    """The report of a posterior on held-out inputs `x` and targets `y`, as the text of a page; written to `out` if given.

    names: of the targets, one for each output. classes: their labels in the order of the outputs; a list of such lists where
    there are several targets. mask: boolean, shaped like y, True where a target was observed. images: pictures of the inputs,
    [N, H, W], [N, 3, H, W] or [N, H, W, 3]; True where `x` itself is that. An `x` of one column gets predictive bands.
    """
    from plausible.apps.report.collecting import findings_of_data, pictures
    from plausible.apps.report.sections import page
    from plausible.core.data import num_rows

    findings = findings_of_data(posterior, x, y, title=title, names=names, classes=classes, mask=mask)
    if images is None or images is False:
        text = page(findings)
    else:
        text = page(findings, pictures(findings, x if images is True else images, num_rows(posterior.inputs(x))))
    if out is not None:
        _put(Path(out), text)
    return text


def _put(path: Path, text: str) -> Path:
    """Write the page beside its place and move it there."""
    from plausible.core.storage import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8"))
    except OSError as error:
        raise ValueError(f"out={str(path)!r} cannot be written: {(error.strerror or str(error)).lower()}") from error
    return path
