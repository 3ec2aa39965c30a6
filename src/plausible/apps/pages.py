"""The pages that the library writes: Jinja templates, and matplotlib figures as SVG in the colours of the page.

A figure is drawn in the colours of `LIGHT`; in its SVG each of them becomes the CSS variable of the same name, so that it follows
light, dark and paper as the page does. Nothing in a page asks for anything else, and its policy forbids it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    # name: (on light screens and paper, on dark screens)
    "paper": ("#f6f7f8", "#14171a"),
    "card": ("#ffffff", "#1d2126"),
    "ink": ("#24292f", "#dfe3e8"),
    "soft": ("#5a636d", "#a2abb5"),
    "line": ("#d9dde2", "#363d45"),
    "edge": ("#868e97", "#808992"),
    "main": ("#1f5f99", "#8cc4f2"),
    "alarm": ("#b23a14", "#ff8a5c"),
    "good": ("#1a6b34", "#76d18f"),
    "doubt": ("#7a5200", "#e6b450"),
    "second": ("#a3420b", "#f0a06a"),
    "third": ("#5d3fa8", "#b9a2f5"),
    "fourth": ("#0f6b6b", "#6fd0d0"),
}
LIGHT, DARK = ({name: pair[k] for name, pair in COLOURS.items()} for k in (0, 1))
SERIES = ("main", "second", "third", "alarm", "fourth", "good")  # C0, C1, …: C3 is an alarm in our plots


class Shown(NamedTuple):
    """A figure of the page: its SVG, name and caption, and the numbers behind it where they are given."""

    chart: Any
    name: str
    caption: str
    heads: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def shown(
    draw: Callable[[Any], Any], name: str, key: str, alt: str, caption: str, *, heads: Any = (), rows: Any = (), **settings: Any
) -> Shown:
    """The figure that `draw` draws; `key`, `alt` and `settings` are those of `chart`."""
    return Shown(chart(draw, alt, key, **settings), name, caption, heads, rows)


def render(template: str, **content: Any) -> str:
    """The page of `apps/templates/TEMPLATE`; text is escaped, `Markup` is not."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(f"pages need jinja2 ({error}): pip install 'plausible[plot]'") from error
    loader = PackageLoader("plausible.apps", "templates")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.get_template(template).render(light=LIGHT, dark=DARK, **content)


def chart(draw: Callable[[Any], Any], alt: str, key: str, *, size: tuple[float, float] = (4.7, 3.4), panels: int = 1) -> Any:
    """What `draw(ax)` draws as an inline `<svg>`, announced as one image with `alt` in words; the legend goes below.

    key: unlike that of any other chart of the page, as the names inside come from it. panels: with several, `draw` is given an
    array of axes that share x, the first three times as high.
    """
    try:
        from markupsafe import Markup
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pages with figures need matplotlib and jinja2 ({error}): pip install 'plausible[plot]'") from error
    from cycler import cycler

    style: Any = {
        "axes.prop_cycle": cycler(color=[LIGHT[name] for name in SERIES]),
        "axes.edgecolor": LIGHT["edge"],
        "axes.labelcolor": LIGHT["ink"],
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.titlecolor": LIGHT["ink"],
        "axes.titlesize": 12,
        "grid.color": LIGHT["line"],
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["edge"],
        "ytick.color": LIGHT["line"],
        "xtick.labelcolor": LIGHT["soft"],
        "ytick.labelcolor": LIGHT["soft"],
        "ytick.major.size": 0,
        "font.size": 12,
        "legend.frameon": False,
        "legend.labelcolor": LIGHT["soft"],
        "savefig.facecolor": "none",
        # Text stays text: it can be read aloud, searched, and follows the fonts of the page.
        "svg.fonttype": "none",
        "svg.hashsalt": key,
    }
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(panels, 1, squeeze=False, sharex=True, height_ratios=[3, *[1] * (panels - 1)])[:, 0]
        draw(axes[0] if panels == 1 else axes)
        _legend_below(figure, axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Markup(_inline(buffer.getvalue(), alt, key))


def _legend_below(figure: Any, axes: Any) -> None:
    named: dict[str, Any] = {}
    for ax in axes:
        if (legend := ax.get_legend()) is not None:
            handles, labels = ax.get_legend_handles_labels()
            named |= dict(zip(labels, handles))
            legend.remove()
    if named:
        columns = _legend_columns(list(named), letters=round(10 * figure.get_figwidth()))
        layout = {"loc": "outside lower left", "ncols": columns, "handlelength": 1.4, "columnspacing": 1.2}
        figure.legend(named.values(), named, fontsize=11, **layout)


def _legend_columns(names: list[str], letters: int) -> int:
    """As many columns, filled one after the other, as a line of this many letters holds; a handle takes five."""
    for columns in range(len(names), 1, -1):
        height = -(-len(names) // columns)
        widths = [max(map(len, names[start : start + height])) + 5 for start in range(0, len(names), height)]
        if sum(widths) <= letters:
            return columns
    return 1


def _inline(svg: str, alt: str, key: str) -> str:
    """An SVG file → an element of a page: no head, no names but those it needs itself, colours by their variables."""
    from html import escape

    box = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
    # one namespace for each chart: two that draw the same clip or marker would share an id
    prefix = "c" + hashlib.sha256(key.encode()).hexdigest()[:8]
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body).replace("url(#", f"url(#{prefix}-")
    body = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", body)
    named = {colour: name for name, colour in LIGHT.items()} | {"#808080": "edge", "#000000": "ink"}
    body = re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var(--{named[match[0]]})" if match[0] in named else match[0], body)
    body = re.sub(r"\n\s*", "\n", body)
    view = box[1] if box else "0 0 380 250"
    return f'<svg class="chart" viewBox="{view}" role="img" aria-label="{escape(alt)}">{body.strip()}'


def png(pixels: np.ndarray) -> str:
    """Grey [H, W] or colour [H, W, 3] pixels in [0, 1] → an address of the data kind, for `<img src>`."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, np.clip(np.nan_to_num(pixels), 0, 1), cmap="gray", vmin=0, vmax=1, format="png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def percent_axes(ax: Axes, which: str = "xy") -> None:
    from matplotlib.ticker import PercentFormatter

    for letter in which:
        getattr(ax, f"{letter}axis").set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
