"""Results of a reproduction at its smallest size, trained once for all tests of this folder that look at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import load
from experiments.frame import Request
from experiments.running import Folder, run, wanted

REQUEST = Request(seeds=2, device="cpu", compile=False, progress=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with the results of all cells of a reproduction that have a tiny version."""
    out = tmp_path_factory.mktemp("reproductions")
    made = set()

    def results(name: str) -> Path:
        if not (Path(os.environ.get("PLAUSIBLE_DATA") or "nowhere") / "mnist").is_dir():
            pytest.skip("PLAUSIBLE_DATA has no folder mnist")
        if name not in made:
            reproduction = load(name)
            some = ("mixture", "gaussian") if name == "singh-faithful" else ()  # the others run the same code as those of singh
            run(reproduction, "tiny", wanted(reproduction, "tiny", (), some), Folder(out, name, "tiny"), REQUEST)
            made.add(name)
        return out

    return results
