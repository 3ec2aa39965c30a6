"""The look of pages that the library writes: one style sheet, light and dark, for phones, keyboards and paper."""

from __future__ import annotations

from html import escape

LIGHT = {
    "paper": "#f6f7f8",
    "card": "#ffffff",
    "ink": "#24292f",
    "soft": "#5a636d",
    "line": "#d9dde2",
    "edge": "#868e97",
    "main": "#1f5f99",
    "alarm": "#b23a14",
    "good": "#1a6b34",
    "doubt": "#7a5200",
    "wide": "#cfe0f0",
    "narrow": "#94bbdf",
    "second": "#a3420b",
    "third": "#5d3fa8",
    "fourth": "#0f6b6b",
}
DARK = {
    "paper": "#14171a",
    "card": "#1d2126",
    "ink": "#dfe3e8",
    "soft": "#a2abb5",
    "line": "#363d45",
    "edge": "#808992",
    "main": "#8cc4f2",
    "alarm": "#ff8a5c",
    "good": "#76d18f",
    "doubt": "#e6b450",
    "wide": "#2b435a",
    "narrow": "#41688e",
    "second": "#f0a06a",
    "third": "#b9a2f5",
    "fourth": "#6fd0d0",
}


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
@media print {{ :root {{ {_variables(LIGHT)} }} }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  overflow-wrap: break-word;
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.7rem, 5vw, 2.4rem); line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 1rem;
  text-wrap: balance; }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 3.5rem 0 0.5rem; padding-top: 1.5rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2.25rem 0 0.25rem; }
p, dl, ul { max-width: 42rem; }
a { color: var(--main); }
:focus-visible { outline: 3px solid var(--main); outline-offset: 2px; border-radius: 4px; }
.note { color: var(--soft); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem;
  margin: 1.25rem 0; }
.grid.narrow { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); }
figure { margin: 0; padding: 0.75rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  min-width: 0; }
figure.single { max-width: 38rem; margin: 1.25rem 0; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.875rem; line-height: 1.45; color: var(--soft); padding: 0.5rem 0.25rem 0; }
figcaption b { color: var(--ink); }
.scroll { overflow-x: auto; margin: 1.25rem 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem; line-height: 1.35;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.55rem 0.8rem; text-align: right; white-space: nowrap; }
thead th { font-weight: 500; color: var(--soft); vertical-align: bottom; }
th:first-child { text-align: left; font-weight: 600; position: sticky; left: 0; background: var(--card); }
tbody tr { border-top: 1px solid var(--line); }
td.failed { text-align: left; color: var(--alarm); white-space: normal; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.875em; }
pre { max-width: 46rem; padding: 0.9rem 1rem; overflow-x: auto; line-height: 1.5;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
details { max-width: 46rem; margin-top: 1.5rem; }
summary { cursor: pointer; color: var(--main); }
dt { font-weight: 600; margin-top: 1rem; }
dd { margin: 0.15rem 0 0; color: var(--soft); overflow-wrap: anywhere; }
footer { margin-top: 3.5rem; font-size: 0.875rem; color: var(--soft); }
"""
)

REPORT = """
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: 1rem; padding: 0.5rem 1rem; background: var(--card); z-index: 1; }
.visually-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
header, .page-foot { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 0; }
.page-foot { padding: 0 1.25rem 3rem; margin-top: 0; }
main { padding-top: 0.5rem; padding-bottom: 2rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.35rem 1.25rem; list-style: none; margin: 0; padding: 0;
  max-width: none; font-size: 0.9375rem; }
nav a { display: inline-block; padding: 0.3rem 0; }
h2 { margin-top: 3rem; }
h4 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); align-items: start; }
.chart { display: block; width: 100%; height: auto; max-width: 32rem; margin: 0 auto; }
.chart text { font-size: 13px; fill: var(--soft); } .chart .label { fill: var(--ink); }
svg path { fill: none; } .axis { stroke: var(--edge); } .rule { stroke: var(--line); }
.line { stroke-width: 2; stroke-linejoin: round; } .dots { stroke-linecap: round; }
.main { stroke: var(--main); } .second { stroke: var(--second); } .third { stroke: var(--third); }
.fourth { stroke: var(--fourth); }
.wrong { stroke: var(--alarm); } .soft { stroke: var(--edge); } .ink { stroke: var(--ink); }
.thin { stroke-width: 1; } .dash { stroke: var(--edge); stroke-dasharray: 5 4; } .range { stroke: var(--narrow); }
path.area.band, path.area.inner, .area { stroke: none; } path.area.band, rect.area.band { fill: var(--wide); }
path.area.inner, rect.area.inner { fill: var(--narrow); } rect.area.bar { fill: var(--main); }
path.area.chance { fill: var(--edge); opacity: 0.28; } rect.area.chance { fill: var(--edge); opacity: 0.28; }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; list-style: none; margin: 0.25rem 0 0; padding: 0 0.25rem;
  font-size: 0.8125rem; color: var(--soft); }
.legend li { display: inline-flex; align-items: center; gap: 0.35rem; } .legend svg { width: 20px; height: 12px; }
.verdicts { list-style: none; margin: 1.25rem 0; padding: 0; max-width: 52rem; display: grid; gap: 0.75rem; }
.verdict { padding: 0.75rem 1rem; background: var(--card); border: 1px solid var(--line);
  border-left: 5px solid var(--edge); border-radius: 8px; }
.verdict p { margin: 0.2rem 0 0; max-width: none; font-size: 0.9375rem; line-height: 1.5; }
.verdict .says { font-size: 1.0625rem; font-weight: 600; margin: 0; }
.verdict .detail { color: var(--soft); }
.good { border-left-color: var(--good); } .bad { border-left-color: var(--alarm); }
.unclear { border-left-color: var(--doubt); }
.tag { display: inline-block; margin-right: 0.5rem; font-size: 0.8125rem; font-weight: 600; letter-spacing: 0.02em; }
.good .tag { color: var(--good); } .bad .tag { color: var(--alarm); } .unclear .tag { color: var(--doubt); }
.plain .tag { color: var(--soft); }
dl { max-width: 52rem; margin: 1rem 0; }
dl div { display: grid; grid-template-columns: minmax(8rem, 12rem) 1fr; gap: 0.25rem 1rem; padding: 0.45rem 0;
  border-top: 1px solid var(--line); }
dt, dd { margin: 0; } dd { color: var(--ink); }
caption { text-align: left; padding: 0.6rem 0.8rem 0; font-size: 0.875rem; color: var(--soft); }
.scroll.words th { text-align: left; } .scroll.words td { text-align: left; }
.scroll.words td:last-child { white-space: normal; min-width: 11rem; }
.scroll.words th:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 5rem; }
.scroll { max-width: 100%; } .scroll.words { max-width: 52rem; } .scroll.scores { max-width: 46rem; }
.scroll.scores th:first-child { white-space: normal; min-width: 8rem; }
.scroll.scores thead th { white-space: normal; overflow-wrap: anywhere; min-width: 4rem; }
.scroll.rows th, .scroll.rows td { max-width: 14rem; overflow: hidden; text-overflow: ellipsis; }
details .scroll { margin: 0.5rem 0; } figure details { margin: 0.5rem 0.25rem 0; font-size: 0.875rem; }
figure .scroll { border: 0; border-radius: 0; } figure table { font-size: 0.8125rem; }
figure th, figure td { padding: 0.25rem 0.5rem; }
.faces { display: flex; flex-wrap: wrap; gap: 1rem; list-style: none; padding: 0; max-width: none; }
.faces li { width: 7.5rem; font-size: 0.8125rem; line-height: 1.4; }
.faces img { width: 7.5rem; height: 7.5rem; object-fit: contain; image-rendering: pixelated; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; }
.miss { color: var(--alarm); font-weight: 600; }
@media (max-width: 30rem) { dl div { grid-template-columns: 1fr; } th, td { padding: 0.45rem 0.55rem; } }
@media (prefers-reduced-motion: no-preference) { html { scroll-behavior: smooth; } }
"""


def document(title: str, body: str, style: str = STYLE + REPORT) -> str:
    """A whole page of its own: nothing in it asks for anything else, and its policy forbids it."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
