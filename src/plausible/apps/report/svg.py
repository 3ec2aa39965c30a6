"""Charts as SVG in the colours of the page: CSS classes and no colours of their own, so that they follow light and dark.

Coordinates are user units of a picture 380 wide, which is about its width in pixels, on a phone and in a column of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

import numpy as np

Values = Sequence[float] | np.ndarray

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 22, 12, 46


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`, steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    rough = span / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(values: Sequence[float]) -> list[str]:
    """Labels with as many decimals as the steps need, `12k` and `3M` for thousands and millions."""
    step = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) or 1.0)
    top = max(map(abs, values))
    scale, unit = (1e6, "M") if top >= 1e6 and step >= 1e4 else (1e3, "k") if top >= 1e4 and step >= 10 else (1.0, "")
    if top >= 1e10 or (top < 1e-3 and top > 0):
        return [f"{value:.3g}".replace("-", "−") for value in values]
    decimals = next((d for d in range(9) if abs(step / scale - round(step / scale, d)) < 1e-6 * step / scale), 9)
    return [f"{value / scale:.{decimals}f}{unit if value else ''}".replace("-", "−") for value in values]


def limits(*arrays: Iterable[float] | np.ndarray, margin: float = 0.04) -> tuple[float, float]:
    """The range of all finite values with a margin; never empty."""
    values = np.concatenate([np.asarray(array, dtype=np.float64).reshape(-1) for array in arrays])
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    pad = margin * (high - low) or abs(low) * 0.1 or 1.0
    return low - pad, high + pad


class Chart:
    """A plot with two axes; things are drawn in the order in which they are added, in data coordinates."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        xlabel: str,
        ylabel: str,
        *,
        xticks: Sequence[float] | None = None,
        yticks: Sequence[float] | None = None,
        texts: Callable[[Sequence[float]], list[str]] = tick_text,
        height: int = HEIGHT,
    ) -> None:
        self.x, self.y, self.height = x, y, height
        self.labels = (xlabel, ylabel)
        self.xticks = ticks(*x) if xticks is None else list(xticks)
        self.yticks = ticks(*y, 4) if yticks is None else list(yticks)
        self.texts = texts
        self.wide, self.high = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM
        self.marks: list[str] = []
        self.entries: list[tuple[str, str, str]] = []

    def _x(self, value: float) -> float:
        return round((value - self.x[0]) / (self.x[1] - self.x[0]) * self.wide, 1)

    def _y(self, value: float) -> float:
        place = (self.y[1] - value) / (self.y[1] - self.y[0]) * self.high
        return round(min(max(place, -1e4), 1e4), 1)  # far outside is clipped anyway

    def _path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        points = [(float(a), float(b)) for a, b in zip(xs, ys)]
        parts, start = [], True
        for a, b in points:
            if math.isfinite(a) and math.isfinite(b):
                parts.append(f"{'M' if start else 'L'}{self._x(a)} {self._y(b)}")
            start = not (math.isfinite(a) and math.isfinite(b))
        return "".join(parts)

    def line(self, xs: Iterable[float], ys: Iterable[float], kind: str = "main", name: str = "") -> Chart:
        """A line through points; gaps where a value is not finite."""
        self.marks.append(f'<path class="line {kind}" d="{self._path(xs, ys)}"/>')
        return self._named(name, "line", kind)

    def area(self, xs: Values, low: Values, high: Values, kind: str, name: str = "") -> Chart:
        """The area between two curves."""
        there, back = self._path(xs, high), self._path(list(xs)[::-1], list(low)[::-1]).replace("M", "L")
        self.marks.append(f'<path class="area {kind}" d="{there}{back}Z"/>')
        return self._named(name, "area", kind)

    def dots(self, xs: Iterable[float], ys: Iterable[float], kind: str = "main", r: float = 3, name: str = "") -> Chart:
        """Filled circles, as one path of round caps."""
        path = "".join(f"M{self._x(float(a))} {self._y(float(b))}h0" for a, b in zip(xs, ys) if math.isfinite(a + b))
        self.marks.append(f'<path class="dots {kind}" stroke-width="{2 * r:g}" d="{path}"/>')
        return self._named(name, "dots", kind)

    def sticks(self, xs: Iterable[float], low: Iterable[float], high: Iterable[float], kind: str, name: str = "") -> Chart:
        """Vertical segments."""
        path = "".join(f"M{self._x(float(a))} {self._y(float(b))}V{self._y(float(c))}" for a, b, c in zip(xs, low, high))
        self.marks.append(f'<path class="line {kind}" d="{path}"/>')
        return self._named(name, "line", kind)

    def bars(self, edges: Values, heights: Values, kind: str = "bar", name: str = "") -> Chart:
        """Bars from the lower axis, with a gap of a unit between them."""
        floor = self._y(max(self.y[0], 0.0))
        for (left, right), top in zip(pairwise(edges), heights):
            a, b, c = self._x(left) + 0.5, self._x(right) - 0.5, self._y(top)
            self.marks.append(f'<rect class="area {kind}" x="{a:g}" y="{c:g}" width="{b - a:.1f}" height="{floor - c:.1f}"/>')
        return self._named(name, "area", kind)

    def text(self, x: float, y: float, words: str, anchor: str = "middle") -> Chart:
        """Small words at a place."""
        self.marks.append(f'<text x="{self._x(x)}" y="{self._y(y)}" text-anchor="{anchor}">{escape(words)}</text>')
        return self

    def _named(self, name: str, mark: str, kind: str) -> Chart:
        if name:
            self.entries.append((name, mark, kind))
        return self

    def svg(self, alt: str) -> str:
        """The picture, announced as one image with `alt` in words."""
        out = [f'<svg class="chart" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(alt)}">']
        for place, words in zip(self.yticks, self.texts(self.yticks) if self.yticks else ()):
            at = TOP + self._y(place)
            out.append(f'<path class="rule" d="M{LEFT} {at:g}h{self.wide}"/>')
            out.append(f'<text x="{LEFT - 6}" y="{at + 4:g}" text-anchor="end">{escape(words)}</text>')
        for place, words in zip(self.xticks, self.texts(self.xticks) if self.xticks else ()):
            at = LEFT + self._x(place)
            out.append(f'<path class="axis" d="M{at:g} {TOP + self.high}v4"/>')
            out.append(f'<text x="{at:g}" y="{TOP + self.high + 17}" text-anchor="middle">{escape(words)}</text>')
        # An inner picture clips what leaves the axes.
        out.append(f'<svg x="{LEFT}" y="{TOP}" width="{self.wide}" height="{self.high}">{"".join(self.marks)}</svg>')
        out.append(f'<path class="axis" d="M{LEFT} {TOP + self.high}h{self.wide}"/>')
        xlabel, ylabel = self.labels
        out.append(
            f'<text class="label" x="{LEFT + self.wide / 2:g}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(_short(xlabel, 52))}</text>"
        )
        middle = TOP + self.high / 2
        out.append(
            f'<text class="label" transform="translate(12 {middle:g}) rotate(-90)" text-anchor="middle">'
            f"{escape(_short(ylabel, 32))}</text>"
        )
        return "".join(out) + "</svg>" + self._legend()

    def _legend(self) -> str:
        items = []
        for name, mark, kind in self.entries:
            shape = {
                "line": f'<path class="line {kind}" d="M1 6h18"/>',
                "area": f'<rect class="area {kind}" x="2" y="1" width="16" height="10"/>',
                "dots": f'<path class="dots {kind}" stroke-width="6" d="M10 6h0"/>',
            }[mark]
            items.append(f'<li><svg viewBox="0 0 20 12" aria-hidden="true">{shape}</svg>{escape(name)}</li>')
        return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def thin(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced indices below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
