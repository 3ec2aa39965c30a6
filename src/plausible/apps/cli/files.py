"""Tables in and out of files: CSV by the standard library, TSV likewise, Parquet where polars or pandas is there."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plausible.core.storage import write_atomically

if TYPE_CHECKING:
    from plausible.apps.tables import Column, Table

DELIMITERS = (",", ";", "\t", "|")
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+(,[0-9]+)?")
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?P<mark>[,' \u00a0\u202f])[0-9]{3}((?P=mark)[0-9]{3})*(\.[0-9]+)?")
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")


def read_table(path: Path) -> Table:
    """The table in a `.csv`, `.tsv` or `.parquet` file; any other ending is read as CSV."""
    if not path.exists():
        raise FileNotFoundError(2, "no such file", str(path))
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a CSV file was expected")
    if path.suffix.lower() in (".parquet", ".pq"):
        return read_parquet(path)
    return read_csv(path, "\t" if path.suffix.lower() in (".tsv", ".tab") else None)


def read_csv(path: Path, delimiter: str | None = None) -> Table:
    """A CSV file with a header line, UTF-8 with or without a byte-order mark, quoted as RFC 4180 says.

    Without a delimiter, the one of comma, semicolon, tab and bar that stands most often in the header is taken. Empty
    lines, and empty rows at the end, are passed over; a nameless column is called after its place: `unnamed 1`.
    A column of numbers with decimal commas (in quotes, where the comma separates cells) is read as such; where the comma
    separates cells, marks between thousands are taken out of numbers.
    """
    from plausible.apps.tables import Table

    text = decode(path)
    if not text.strip():
        raise ValueError(f"{path} is empty; expected a header line and one line per row")
    first = text.lstrip("\r\n").splitlines()[0]
    delimiter = delimiter or max(DELIMITERS, key=first.count)
    try:
        csv.field_size_limit(2**24)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise ValueError(f"{path} is not a readable CSV file: {error} (line {reader.line_num})") from error
    (_, header), *rows = lines
    while rows and not any(text.strip() for text in rows[-1][1]):
        rows.pop()
    names = [name.strip() or f"unnamed {position}" for position, name in enumerate(header, start=1)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path} has columns of the same name: {', '.join(repeated)}; rename them in the header")
    for line, cells in rows:
        if len(cells) != len(names):
            raise ValueError(
                f"{path}, line {line}: {len(cells)} cells, but the header has {len(names)} columns (separated by "
                f"{delimiter!r}); a cell that holds the separator must be quoted"
            )
    if not rows:
        raise ValueError(f"{path} has a header but no rows")
    table = Table.from_values(dict(zip(names, zip(*(cells for _, cells in rows)))))
    columns = table.columns.values()
    return Table(map(with_points, map(without_marks, columns) if delimiter == "," else columns))


def without_marks(column: Column) -> Column:
    """Marks between thousands (`"1,234.5"`, `1 234`) taken out, where every cell is a number and some have them."""
    marked = {level for level in column.levels if THOUSANDS.fullmatch(level)}
    if not marked or not all(level in marked or PLAIN.fullmatch(level) for level in column.levels):
        return column
    strip = {level: re.sub(r"[^0-9.+-]", "", level) for level in marked}
    return replace(column, cells=tuple(cell if cell is None else strip.get(cell, cell) for cell in column.cells))


def with_points(column: Column) -> Column:
    """Decimal commas as points, where every cell is such a number and not all could be thousands (`1,234`)."""
    numeric = all(DECIMAL_COMMA.fullmatch(level) for level in column.levels)
    if not numeric or all("," not in level or len(level.partition(",")[2]) == 3 for level in column.levels):
        return column
    return replace(column, cells=tuple(None if cell is None else cell.replace(",", ".") for cell in column.cells))


def decode(path: Path) -> str:
    """The text of a file, UTF-8; anything else is refused with what to do about it."""
    raw = path.read_bytes()
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16, UTF-8 was expected; convert it: iconv -f UTF-16 -t UTF-8 {path} > utf8.csv")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path} is not UTF-8 text (byte 0x{raw[error.start]:02x} in line {line}); if it is Latin-1, convert it: "
            f"iconv -f LATIN1 -t UTF-8 {path} > utf8.csv"
        ) from error
    if "\x00" in text:
        raise ValueError(f"{path} holds zero bytes: it is not a text file")
    return text


def read_parquet(path: Path) -> Table:
    """A Parquet file through polars, or pandas where only that is installed."""
    from plausible.apps.tables import Table

    columns: dict[str, Iterable[Any]]
    try:
        try:
            import polars

            columns = {series.name: series.to_list() for series in polars.read_parquet(path)}
        except ModuleNotFoundError:
            import pandas

            frame = pandas.read_parquet(path)
            columns = {str(name): frame[name].astype(object).tolist() for name in frame.columns}
    except ImportError as error:
        raise ValueError(f"reading {path} needs polars or pandas: pip install 'plausible[tables]'") from error
    except OSError:
        raise
    except Exception as error:  # each reader has its own exceptions for a damaged file
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error
    table = Table.from_values(columns)
    if table.rows == 0:
        raise ValueError(f"{path} has no rows")
    return table


def write_csv(path: Path | None, columns: Mapping[str, Sequence[Any]]) -> None:
    """Columns as a CSV file, whole or not at all; None is stdout. Numbers have eight digits, large ones twelve."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return format(value, ".12g" if abs(value) >= 1e5 else ".8g")
        return "" if value is None else str(value)

    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(cell, row) for row in zip(*columns.values()))
    if path is None:
        sys.stdout.write(buffer.getvalue())
        sys.stdout.flush()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue().encode())
