"""The generated part of a page in docs/reproductions: verdicts, tables and figures of the stored results, between two marks."""

from __future__ import annotations

import os
from pathlib import Path

from experiments import NAMES, load
from experiments.frame import SIZES, Part, Reproduction, Results, Sheet, Size
from experiments.running import Folder
from plausible.core import storage

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def sheets(part: Part, size: Size, results: Results) -> list[Sheet]:
    """The claims of a part beside what came out, then its further tables."""
    rows = []
    for judged in part.judged(size, results):
        verdict = f"{judged.verdict} ({judged.note})" if judged.note else judged.verdict
        rows.append((judged.label, judged.ours.text(), judged.published, judged.expected, verdict))
    found = [Sheet("", ("", "ours", "published", "expected", "verdict"), tuple(rows))] if rows else []
    return found + (list(part.sheets(results)) if part.sheets is not None else [])


def generated(page: str, folder: Path) -> str:
    """Everything between the marks, from the results under `folder`, in Markdown."""
    sections = []
    for name in NAMES:
        found = load(name)
        if found.page != page:
            continue
        for size in SIZES[:2]:
            place = Folder(folder, name, size)
            results = place.results(found)
            if results:
                sections.append(_section(found, size, results, place))
    return "\n\n".join(sections) or "No results are stored yet."


def write(page: str, folder: Path) -> Path:
    """Put the results into `folder/page.md`, which must have the two marks; a page that is not there is begun."""
    path = folder / f"{page}.md"
    titles = [load(name) for name in NAMES if load(name).page == page]
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {titles[0].title}\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r} to write the results between")
    whole = f"{before}{BEGIN}\n\n{generated(page, folder)}\n\n{END}{after}"
    storage.write_atomically(path, whole.encode())
    return path


def _section(found: Reproduction, size: Size, results: Results, place: Folder) -> str:
    lines = [f"### {found.name}, {size}"]
    for part in found.parts:
        own = {name: results[name] for name in part.cells.get(size, ()) if name in results}
        if not own:
            continue
        lines.append(f"#### {part.title}")
        lines += [_markdown(sheet) for sheet in sheets(part, size, own)]
        image = place.path / f"{part.key}.svg"
        if image.exists():
            shown = os.path.relpath(image, (place.out / f"{found.page}.md").parent)
            lines.append(f"![{part.title}]({Path(shown).as_posix()})")
    lines.append(_provenance(results))
    return "\n\n".join(lines)


def _markdown(sheet: Sheet) -> str:
    head = [f"| {' | '.join(sheet.head)} |", f"|{'---|' * len(sheet.head)}"]
    table = "\n".join([*head, *(f"| {' | '.join(row)} |" for row in sheet.rows)])
    return f"{sheet.title}:\n\n{table}" if sheet.title else table


def _provenance(results: Results) -> str:
    """Where and with what the results were computed."""
    made = sorted(
        {
            f"{r['versions']['device']}, torch {r['versions']['torch']}, plausible {r['versions']['plausible']}, {r['seeds']} seeds"
            for r in results.values()
        }
    )
    total = sum(float(r["seconds"]) for r in results.values())
    return f"Computed on: {'; '.join(made)}. Together {total:,.0f} s."
