"""Results of every reproduction at its smallest size, trained once for all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments import NAMES, load
from experiments.frame import Request
from experiments.running import Folder, run, wanted

REQUEST = Request(seeds=2, device="cpu", compile=False, progress=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of all cells that have a tiny version."""
    if not (Path(os.environ.get("PLAUSIBLE_DATA") or "nowhere") / "mnist").is_dir():
        pytest.skip("PLAUSIBLE_DATA has no folder mnist")
    out = tmp_path_factory.mktemp("reproductions")
    for name in NAMES:
        found = load(name)
        some = ("mixture", "gaussian") if name == "singh-faithful" else ()  # the others run the same code as those of singh
        run(found, "tiny", wanted(found, "tiny", (), some), Folder(out, name, "tiny"), REQUEST)
    return out
