"""Folders of the library; this loads no PyTorch, which no list of names needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where the library keeps what it can make or fetch again: `PLAUSIBLE_CACHE`, or the user's cache folder of the platform."""
    if name := os.environ.get("PLAUSIBLE_CACHE", ""):
        return Path(name).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "plausible"
