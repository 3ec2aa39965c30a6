"""Shared fixtures: one thread (two test processes share two cores), and skips with a reason."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
# Tests start some fifty Pythons, and pytest rewrites every file of tests: without bytecode all of it is compiled anew each time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process has another to compile in
os.fsync = lambda _: None  # it guards against power cuts, which do not happen here, and is slow
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs in the background


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiler() -> None:
    """Skip where torch.compile cannot build kernels."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler: torch.compile cannot build kernels here")


@pytest.fixture
def data_folder() -> Path:
    """The folder of real data, or a skip."""
    folder = os.environ.get("PLAUSIBLE_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("PLAUSIBLE_DATA does not name a folder")
    return Path(folder)
