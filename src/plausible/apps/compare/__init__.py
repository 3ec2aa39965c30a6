"""Compare methods on data sets and splits: the same data, the same protocol, paired differences.

    study = compare.read("study.toml")
    results = compare.run(study, "comparison", jobs=2)
    compare.summarise(study, results).rows

`plausible compare` does the same from the command line, with a table, JSON and a page.
"""

from plausible.apps.compare.runner import run
from plausible.apps.compare.study import Candidate, Cell, Published, Study, example, parse, read
from plausible.apps.compare.tables import Difference, Mean, Row, Summary, summarise

__all__ = [
    "Candidate",
    "Cell",
    "Difference",
    "Mean",
    "Published",
    "Row",
    "Study",
    "Summary",
    "example",
    "parse",
    "read",
    "run",
    "summarise",
]
