"""Numbers, shares and counts as text, the same everywhere, and the logger that messages go to."""

from __future__ import annotations

import logging
import math

log = logging.getLogger("plausible")


def number(value: float, digits: int = 3) -> str:
    """Three digits, with a thin space between thousands: `1 234`, `0.0123`, `1.2e-07`."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "not a number")
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{value:,.0f}".replace(",", "\u202f").replace("-", "−")
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 7:
        text = f"{value:,.{max(0, digits - 1 - size)}f}".replace(",", "\u202f")
    else:
        text = f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return text.replace("-", "−")


def printable(text: str) -> str:
    """Text without what a terminal would obey: control characters, such as those of escape codes, are spelt out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def percent(share: float, digits: int = 0) -> str:
    """`83 %`; never 100 % or 0 % for a share that is neither."""
    text = f"{100 * share:.{digits}f}"
    if text == f"{100:.{digits}f}" and share < 1:
        return f">{100 - 10.0**-digits:.{digits}f}\u00a0%"
    if text == f"{0:.{digits}f}" and share > 0:
        return f"<{10.0**-digits:.{digits}f}\u00a0%"
    return f"{text}\u00a0%"


def plural(count: int, noun: str = "row") -> str:
    """`1 row`, `1,234 rows`."""
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def size(memory: float) -> str:
    """Bytes as text: `350 MiB`, `1.2 GiB`."""
    return f"{memory / 2**30:,.1f} GiB" if memory >= 2**30 else f"{max(1.0, memory / 2**20):,.0f} MiB"
