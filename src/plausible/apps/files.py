"""Tables in and out of files, by the ending of the name: CSV and TSV by the standard library, also in gzip, JSON, Parquet."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.core.storage import write_atomically

if TYPE_CHECKING:
    from plausible.apps.tables import Column, Table

DELIMITERS = (",", ";", "\t", "|")
ENDINGS = ".csv, .tsv, .json, .jsonl (each also with .gz) or .parquet"
FOREIGN = frozenset(
    [
        ".xlsx",
        ".xls",
        ".ods",
        ".feather",
        ".arrow",
        ".orc",
        ".avro",
        ".pkl",
        ".pickle",
        ".npy",
        ".npz",
        ".h5",
        ".zip",
        ".bz2",
        ".xz",
        ".zst",
        ".db",
        ".sqlite",
    ]
)
SHOWN = 3
"""Lines of a file that are named where many have the same problem."""

MARK = r"[{0}'’ \u00a0\u202f]"
POINT = re.compile(
    rf"[+-]?([1-9][0-9]{{0,2}}(?P<m>{MARK.format(',')})[0-9]{{3}}((?P=m)[0-9]{{3}})*(\.[0-9]+)?|[0-9]+\.?[0-9]*|\.[0-9]+)"
)
COMMA = re.compile(
    rf"[+-]?([1-9][0-9]{{0,2}}(?P<m>{MARK.format('.')})[0-9]{{3}}((?P=m)[0-9]{{3}})*(,[0-9]+)?|[0-9]+(,[0-9]+)?)"
)
UNIT = r"(?P<{0}>[$€£¥₹₽₩₺₪฿%]|US\$|USD|EUR|CHF|GBP|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|CZK|Fr\.|kr|zł)"
AMOUNT = re.compile(
    rf"(?P<sign>[+-]?)({UNIT.format('before')}\s*)?(?P<digits>[+-]?[0-9.].*?)(\.[-–—])?(\s*{UNIT.format('after')})?"
)
ACCOUNT = re.compile(r"([^()0-9]*)\(([^()+-]*[0-9][^()+-]*)\)")
"""A negative amount as accounts write it: (12.50), $(12.50) or ($12.50)."""


def ending(path: Path) -> tuple[str, bool]:
    """The lower-case ending that says what a file holds, `.csv` where it says nothing, and whether it is compressed."""
    packed = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    if suffix in FOREIGN or (packed and suffix in (".parquet", ".pq")):
        raise ValueError(f"{path}: a table is {ENDINGS}, no {suffix}{'.gz' if packed else ''}; save it as one of these")
    known = {".tsv": ".tsv", ".tab": ".tsv", ".json": ".json", ".jsonl": ".jsonl", ".ndjson": ".jsonl"}
    known |= {".parquet": ".parquet", ".pq": ".parquet"}
    return known.get(suffix, ".csv"), packed


class Ragged(ValueError):
    """Lines of a file have too few or too many cells; `rest` is the table of the others."""

    def __init__(self, message: str, rest: Table):
        super().__init__(message)
        self.rest = rest


def read_table(path: Path, encoding: str | None = None) -> Table:
    """The table in a file, by its ending (`ENDINGS`); any other ending is read as CSV. `encoding` None: UTF-8.

    Numbers may have marks between thousands, a decimal comma where that is plain, and one currency or % for the column.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no such file", str(path))
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a table was expected: {ENDINGS}")
    kind = ending(path)[0]
    if kind in (".csv", ".tsv"):
        return read_csv(path, "\t" if kind == ".tsv" else None, encoding)
    parquet = kind == ".parquet"
    columns = read_parquet(path) if parquet else read_json_table(path, decode(path, encoding), kind == ".jsonl")
    return from_cells(path, columns, thousands=True)


def from_cells(path: Path, columns: Mapping[str, Iterable[Any]], *, thousands: bool) -> Table:
    from plausible.apps.tables import Table

    table = Table.from_values(columns)
    if table.rows == 0:
        raise ValueError(f"{path} has no rows")
    return Table(in_plain_digits(column, thousands) for column in table.columns.values())


def read_csv(path: Path, delimiter: str | None = None, encoding: str | None = None) -> Table:
    """A CSV file with a header line, UTF-8 with or without a byte-order mark, quoted as RFC 4180 says.

    Without a delimiter, the one of comma, semicolon, tab and bar that stands most often in the header is taken. Empty
    lines, and empty rows at the end, are passed over; a nameless column is called after its place: `unnamed 1`.
    """
    text = decode(path, encoding)
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
    problems = []
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"columns of the same name: {', '.join(repeated)}; rename them in the header")
    if ragged := [(line, len(cells)) for line, cells in rows if len(cells) != len(names)]:
        found = ", ".join(f"line {line}: {count} cells" for line, count in ragged[:SHOWN])
        more = f" (and {len(ragged) - SHOWN:,} more lines)" if len(ragged) > SHOWN else ""
        problems.append(
            f"{found}{more}, but the header has {len(names)} columns (separated by {delimiter!r}); a cell that holds the "
            "separator must be quoted"
        )
    if repeated or (rows and len(ragged) == len(rows)):
        raise ValueError(f"{path}: {'; '.join(problems)}")
    if not rows:
        raise ValueError(f"{path} has a header but no rows")
    squared = ((cells + [""] * len(names))[: len(names)] for _, cells in rows)
    table = from_cells(path, dict(zip(names, zip(*squared))), thousands=delimiter == ",")
    if problems:
        whole = np.array([len(cells) == len(names) for _, cells in rows])
        raise Ragged(f"{path}: {'; '.join(problems)}", table.take(whole))
    return table


def in_plain_digits(column: Column, thousands: bool) -> Column:
    """Numbers as Python writes them: without marks between thousands, a currency or %, and with a decimal point.

    Negative ones may stand in parentheses. Only where every cell with a digit in it is such a number, at least half of all are,
    and all have the same unit. `thousands` says that `1,234` is more than a thousand where nothing else in the column tells;
    elsewhere such a column stays as it is.
    """
    amounts = {level: AMOUNT.fullmatch(signed(level)) for level in column.levels if any(map(str.isdigit, level))}
    # (1), (2) and (3) alone are labels; among other numbers they are negative
    if not all(amounts.values()) or all(map(ACCOUNT.fullmatch, amounts)):
        return column
    digits = {level: found["sign"] + found["digits"] for level, found in amounts.items() if found}
    units = {found[side] for found in amounts.values() if found for side in ("before", "after") if found[side]}
    words = sum(cell is not None and cell not in digits for cell in column.cells)
    if len(units) > 1 or 2 * words > len(column.cells):
        return column
    plain = _without_marks(digits.values(), thousands)
    if plain is None:
        return column
    changed = {level: plain[text] for level, text in digits.items() if plain[text] != level}
    if not changed:
        return column
    return replace(column, cells=tuple(changed.get(cell or "", cell) for cell in column.cells), unit="".join(units))


def signed(text: str) -> str:
    """The amount with a hyphen for a sign: accounts write -12 as (12), typesetters have a minus of their own."""
    account = ACCOUNT.fullmatch(text)
    return f"-{account[1]}{account[2]}" if account else text.replace("\N{MINUS SIGN}", "-")


def _without_marks(numbers: Iterable[str], thousands: bool) -> dict[str, str] | None:
    """Each number with a decimal point and no marks; None where they are none, or could be read in two ways."""
    numbers = set(numbers)
    if all(map(POINT.fullmatch, numbers)):
        commas = [number for number in numbers if "," in number]
        if thousands or not commas or any("." in number or number.count(",") > 1 for number in commas):
            return {number: re.sub(r"[^0-9.+-]", "", number) for number in numbers}
        return None
    if all(map(COMMA.fullmatch, numbers)):
        return {number: re.sub(r"[^0-9,+-]", "", number).replace(",", ".") for number in numbers}
    return None


def decode(path: Path, encoding: str | None = None) -> str:
    """The text of a file, unpacked where its name ends in `.gz`; what cannot be decoded is refused with what to do about it."""
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError:
        raise ValueError(f"--encoding {encoding} is not known; utf-8, latin-1, cp1252 and utf-16 are") from None
    raw = path.read_bytes()
    if ending(path)[1]:
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is not a readable gzip file: {error}") from error
    if encoding is None and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path} is UTF-16, UTF-8 was expected; add --encoding utf-16")
    try:
        text = raw.decode(encoding or "utf-8-sig").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        advice = "if it is Latin-1, add --encoding latin-1" if encoding is None else "try another --encoding"
        name = "UTF-8" if encoding is None else encoding
        raise ValueError(f"{path} is not {name} text (byte 0x{raw[error.start]:02x} in line {line}); {advice}") from error
    if "\x00" in text:
        raise ValueError(f"{path} holds zero bytes: it is not a text file")
    return text


def read_json_table(path: Path, text: str, lines: bool) -> Mapping[str, Iterable[Any]]:
    """Records `[{"a": 1}, …]`, one record a line, or columns `{"a": [1, …]}`; a key that a record lacks is a missing cell."""
    try:
        content = [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict) and content and all(isinstance(value, dict) for value in content.values()):
        rows = dict.fromkeys(row for column in content.values() for row in column)  # as pandas writes a frame
        content = {name: [column.get(row) for row in rows] for name, column in content.items()}
    if isinstance(content, dict) and content and all(isinstance(value, list) for value in content.values()):
        if len({len(value) for value in content.values()}) > 1:
            raise ValueError(f"{path} has columns of different lengths")
        columns = content
    elif isinstance(content, list) and all(isinstance(record, dict) for record in content):
        names = list(dict.fromkeys(name for record in content for name in record))
        columns = {name: [record.get(name) for record in content] for name in names}
    else:
        raise ValueError(f'{path} must hold a list of records, [{{"a": 1}}, …], or of columns, {{"a": [1, …]}}')
    if nested := [name for name, values in columns.items() if any(isinstance(value, dict | list) for value in values)]:
        raise ValueError(f"{path} has values inside values in column {nested[0]!r}; a table has one in each cell")
    return columns


def read_parquet(path: Path) -> Mapping[str, Iterable[Any]]:
    """The columns of a Parquet file through polars, or pandas where only that is installed."""
    try:
        try:
            import polars

            return {series.name: series.to_list() for series in polars.read_parquet(path)}
        except ModuleNotFoundError:
            import pandas

            frame = pandas.read_parquet(path)
            return {str(name): frame[name].astype(object).tolist() for name in frame.columns}
    except ImportError as error:
        raise ValueError(f"reading {path} needs polars or pandas: pip install 'plausible[tables]'") from error
    except OSError:
        raise
    except Exception as error:  # each reader has its own exceptions for a damaged file
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def write_table(path: Path | None, columns: Mapping[str, Sequence[Any]]) -> None:
    """Columns as a file of the kind that its ending says (CSV if it says nothing), whole or not at all; None is CSV on stdout."""
    kind, packed = (".csv", False) if path is None else ending(path)
    if kind == ".parquet":
        content = _parquet(columns)
    elif kind in (".json", ".jsonl"):
        records = [json.dumps(dict(zip(columns, row)), ensure_ascii=False) for row in zip(*columns.values())]
        content = ("\n".join(records) + "\n" if kind == ".jsonl" else "[\n" + ",\n".join(records) + "\n]\n").encode()
    else:
        content = _csv(columns, "\t" if kind == ".tsv" else ",").encode()
    if path is None:
        sys.stdout.write(content.decode())
        sys.stdout.flush()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(content, mtime=0) if packed else content)


def check_writable(path: Path | None) -> None:
    """Refuse an ending that is not known, or whose writer is not installed, before the work is done."""
    if path is not None and ending(path)[0] == ".parquet":
        _parquet({})


def _parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError("writing a .parquet file needs pyarrow: pip install 'plausible[tables]', or name a .csv") from error
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), buffer)
    return buffer.getvalue()


def _csv(columns: Mapping[str, Sequence[Any]], delimiter: str) -> str:
    """Numbers have eight digits, large ones twelve."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return format(value, ".12g" if abs(value) >= 1e5 else ".8g")
        return "" if value is None else _no_formula(str(value))

    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=delimiter, lineterminator="\n")
    writer.writerow(map(_no_formula, columns))
    writer.writerows(map(cell, row) for row in zip(*columns.values()))
    return buffer.getvalue()


def _no_formula(text: str) -> str:
    """Text that a spreadsheet takes for a formula, behind an apostrophe, as spreadsheets write such text themselves."""
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
