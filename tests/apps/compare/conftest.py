"""Comparisons read the UCI sets."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The data folder, or a skip where it is absent."""
    folder = Path(os.environ.get("PLAUSIBLE_DATA", ""))
    if not os.environ.get("PLAUSIBLE_DATA") or not (folder / "uci").is_dir():
        pytest.skip("PLAUSIBLE_DATA has no folder uci")
    return folder
