"""Dates in tables: texts → days since 1970-01-01, and what a network is told about a day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ISO = "ISO"
_TIMES = ("", " %H:%M", " %H:%M:%S", "T%H:%M:%S", " %I:%M %p")
_DATES = {
    "%Y/%m/%d": "year/month/day",
    "%Y.%m.%d": "year.month.day",
    "%Y-%m": "year-month",
    "%d.%m.%Y": "day.month.year",
    "%d.%m.%y": "day.month.year",
    "%m/%d/%Y": "month/day/year",
    "%d/%m/%Y": "day/month/year",
    "%m/%d/%y": "month/day/year",
    "%d/%m/%y": "day/month/year",
    "%d-%m-%Y": "day-month-year",
    "%d-%b-%Y": "day-month-year",
    "%d-%b-%y": "day-month-year",
    "%d %b %Y": "day month year",
    "%d %B %Y": "day month year",
    "%b %d, %Y": "month day, year",
    "%B %d, %Y": "month day, year",
}
_HOURS = {"%H:%M": "hour:minute", "%H:%M:%S": "hour:minute:second"}
FORMATS = {ISO: "ISO", **{date + time: words for date, words in _DATES.items() for time in _TIMES}, **_HOURS}
"""How dates are written, in the words of a note; the first that reads every text is taken."""


class Reading(NamedTuple):
    """Days since 1970-01-01 by text, the format they were read by, and another that would have done as well ("": none)."""

    days: Mapping[str, float]
    format: str
    rival: str


def read(texts: Iterable[str], format: str | None = None) -> Reading | None:
    """The texts as dates, all in one format; None where there is none. Texts without a digit are passed over."""
    dated = [text for text in texts if any(map(str.isdigit, text))]
    known = [format] if format else list(FORMATS)
    # the first text leaves a few formats, of which the others are then read
    fitting = [each for each in known if dated and day(dated[0], each) is not None]
    found: list[tuple[str, dict[str, float]]] = []
    for each in fitting:
        days = {text: value for text in dated if (value := day(text, each)) is not None}
        if len(days) == len(dated):
            found.append((each, days))
    if not found:
        return None
    rival = next((FORMATS[name] for name, days in found[1:] if days != found[0][1]), "")
    return Reading(found[0][1], found[0][0], rival)


def day(text: str, format: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text) if format == ISO else datetime.strptime(text, format)
    except ValueError:
        return None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return moment.timestamp() / 86400


def written(days: float) -> str:
    """The day as text, with the time where it has one."""
    moment = np.datetime64(round(days * 86400), "s")
    return str(moment.astype("datetime64[D]")) if days % 1 == 0 else str(moment).replace("T", " ")


def parts(days: np.ndarray) -> dict[str, np.ndarray]:
    """What a calendar says of days [N], part by part [N, width]: when in the year, the week and the day they are.

    `year` is its first day, on the scale of the days themselves; `month` and `hour` are points on a circle, so that December is
    next to January.
    """
    whole = np.floor(days).astype("int64")
    date = whole.astype("datetime64[D]")
    year, month = date.astype("datetime64[Y]"), date.astype("datetime64[M]")
    return {
        "year": year.astype("datetime64[D]").astype(np.float64)[:, None],
        "month": _circle((month - year.astype("datetime64[M]")).astype(np.float64) / 12),
        "weekday": np.eye(7)[(whole + 3) % 7],  # 1970-01-01 was a Thursday
        "hour": _circle(days - whole),
    }


NAMES: dict[str, Any] = {
    "year": ("year",),
    "month": ("month, sine", "month, cosine"),
    "weekday": DAYS,
    "hour": ("hour, sine", "hour, cosine"),
}


def in_years(days: np.ndarray) -> np.ndarray:
    """Days as years with a fraction: 2024-07-02 is 2024.5."""
    first = parts(days)["year"][:, 0]
    year = first.astype("int64").astype("datetime64[D]").astype("datetime64[Y]")
    length = ((year + 1).astype("datetime64[D]") - year.astype("datetime64[D]")).astype(np.float64)
    return year.astype(np.float64) + 1970 + (days - first) / length


def _circle(turns: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)], axis=1)
