"""C++ → loaded machine code, by the system's compiler, kept in the user's cache folder.

A file is named by the program, the compiler, its flags and the processor, and appears when it is whole, so that processes may do
this at once; the next process loads what is there.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from plausible.core.folders import cache_folder
from plausible.core.storage import beside

log = logging.getLogger("plausible")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
)
TUNED: tuple[str | None, ...] = ("-march=native", "-mcpu=native", None)  # the first that works
WAITING = 300.0  # seconds for the compiler


class BuildError(RuntimeError):
    """There is no compiler, or it failed, or what it made cannot be loaded."""


@functools.cache
def _compiler() -> tuple[tuple[str, ...], str] | None:
    """The command of a C++ compiler (`CXX`, c++, g++ or clang++) and what it says of itself."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        command = tuple(shlex.split(name))
        if not command or shutil.which(command[0]) is None:
            continue
        try:
            answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return command, answer.stdout
    return None


@functools.cache
def _processor() -> str:
    """What the machine's instructions depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        own = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        own = {platform.processor()}
    return "\n".join([platform.system(), platform.machine(), *sorted(own)])


def load(program: str) -> ctypes.CDLL:
    """The program as loaded code, compiled unless it lies in the cache; a file that cannot be loaded is made anew."""
    if (compiler := _compiler()) is None:
        raise BuildError("no C++ compiler")
    command, version = compiler
    parts = (program, *command, version, *FLAGS, *map(str, TUNED), _processor())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return _loaded(_writable(cache_folder() / "native") / f"{digest}.so", program, command)


@functools.cache
def _writable(folder: Path) -> Path:
    """The folder, or where it cannot be written to a private one of this process among temporary files."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="plausible-native-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        log.info("compiled code cannot be kept in %s (%s): it is compiled for this process alone", folder, error)
        return private


@functools.lru_cache(maxsize=256)
def _loaded(path: Path, program: str, compiler: tuple[str, ...]) -> ctypes.CDLL:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                log.debug("compiled code in %s cannot be loaded, it is made anew: %s", path, error)
        _compile(program, compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler's work cannot be used: {str(error)[:200]}") from error


def _compile(program: str, compiler: tuple[str, ...], path: Path) -> None:
    """Compile to a file that appears whole; processes that do so at once make the same file, and the last one stays."""
    with tempfile.TemporaryDirectory(prefix="plausible-native-") as folder:
        text = Path(folder) / "perceptron.cpp"
        text.write_text(program)
        made = beside(path)
        try:
            for tuned in TUNED:
                command = [*compiler, *FLAGS, *filter(None, [tuned]), str(text), "-o", str(made)]
                answer = subprocess.run(command, capture_output=True, text=True, timeout=WAITING, check=False)
                if answer.returncode == 0:
                    os.replace(made, path)
                    return
        finally:
            made.unlink(missing_ok=True)
    raise BuildError(f"{' '.join(compiler)} failed: {answer.stderr[-400:]}")


__all__ = ["BuildError", "load"]
