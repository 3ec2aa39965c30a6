"""C++ for a perceptron's log joint: value, gradient and leapfrog paths, with all sizes as constants.

    h_l = a_l(W_l h_{l−1} + b_l),    δ_{l−1} = (W_lᵀ δ_l) ⊙ a'_{l−1},    ∂W_l = Σ_examples δ_l h_{l−1}ᵀ

Vector lanes are examples: a unit's values for all examples of a tile lie side by side, a block of units × lanes stays in
registers, activations are computed there, and gradients of weights are dot products along lanes. `source` writes the
constants of one network in front of `lanes.cpp` and `perceptron.cpp`, which are the same for all. `load` compiles it by the
system's compiler to a file in the user's cache folder, named by the program, the compiler, its flags and the processor.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plausible.core.folders import cache_folder
from plausible.core.likelihoods import LEAST_DF
from plausible.core.storage import beside
from plausible.core.words import log

ACTIVATIONS = ("identity", "tanh", "relu", "sigmoid", "silu", "softplus", "leaky_relu", "elu", "gelu_tanh", "gelu")
LIKELIHOODS = (
    "gaussian",
    "gaussian_learned",
    "gaussian_per_output",
    "student",
    "student_learned",
    "student_per_output",
    "bernoulli",
    "categorical",
    "heteroscedastic",
    "heteroscedastic_student",
)

# (2^f − 1)/f on [−½, ½] as a polynomial: a Chebyshev fit with a relative error of 1.3e-8, and Taylor's series (4e-18).
EXP2_FLOAT = (
    0.6931471880262287,
    0.24022650760568132,
    0.055503571142201544,
    0.00961808255728395,
    0.0013390863364174759,
    0.00015453162941980736,
)
EXP2_DOUBLE = tuple(math.log(2) ** k / math.factorial(k) for k in range(1, 15))


@functools.cache
def _error_function(end: float, degree: int) -> tuple[float, ...]:
    """erf(√w)/√w on [0, end] by Chebyshev polynomials."""

    def ratio(t: np.ndarray) -> np.ndarray:
        roots = np.sqrt(0.5 * end * (t + 1))
        return np.array([math.erf(z) / z for z in np.maximum(roots, 1e-9)])

    return tuple(map(float, np.polynomial.chebyshev.chebinterpolate(ratio, degree)))  # type: ignore[type-var]


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer, where its weights lie in a position, and the activation behind it with its settings."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    activation: str = "identity"
    settings: tuple[float, float] = (0.0, 0.0)


def source(
    layers: Sequence[LinearLayer],
    likelihood: str,
    size: int,
    noise: int | None,
    *,
    double: bool = False,
    df: float = 1.0,
    freedom: int | None = None,
    least: float = 0.0,
) -> str:
    """The whole program for these layers; `noise` is where a learned log scale lies, `size` the number of weights.

    `freedom` is where the weight w of learned degrees of freedom lies, which are `LEAST_DF` + df·e^w; elsewhere they are `df`.
    `least` is the smallest scale where scales are outputs.
    """
    end, degree = (36.0, 52) if double else (16.0, 22)  # beyond √end erf is 1
    series = tuple(1 / (2 * k + 1) for k in range(17 if double else 8))  # atanh(z)/z in z² up to 1/9

    def numbers(kind: str, name: str, values: Sequence[float]) -> str:
        return f"constexpr {kind} {name}[] = {{{', '.join(map(repr, values))}}};"

    constants = [
        f"typedef {'double' if double else 'float'} real;",
        f"typedef {'int64_t' if double else 'int32_t'} whole;",
        f"enum Activation {{{', '.join(name.upper() for name in ACTIVATIONS)}}};",
        f"enum Likelihood {{{', '.join('FOR_' + name.upper() for name in LIKELIHOODS)}}};",
        f"constexpr int DEPTH = {len(layers)};",
        numbers("int", "WIDTH", [layers[0].inputs, *(layer.outputs for layer in layers)]),
        numbers("long", "WEIGHT", [layer.weight for layer in layers]),
        numbers("long", "BIAS", [-1 if layer.bias is None else layer.bias for layer in layers]),
        f"constexpr Activation ACTIVATION[] = {{{', '.join(layer.activation.upper() for layer in layers)}}};",
        numbers("double", "FIRST", [layer.settings[0] for layer in layers]),
        numbers("double", "SECOND", [layer.settings[1] for layer in layers]),
        f"constexpr Likelihood LIKELIHOOD = FOR_{likelihood.upper()};",
        f"constexpr long SIZE = {size}, NOISE = {-1 if noise is None else noise}, FREEDOM = {-1 if freedom is None else freedom};",
        f"constexpr double DF = {df!r}, LEAST_DF = {LEAST_DF!r};",
        f"constexpr real LEAST = {least!r};",
        numbers("real", "EXP2", EXP2_DOUBLE if double else EXP2_FLOAT),
        numbers("real", "ATANH", series),
        f"constexpr real ERF_END = {end};",
        numbers("real", "ERF", _error_function(end, degree)),
    ]
    bodies = [Path(__file__).with_name(name).read_text() for name in ("lanes.cpp", "perceptron.cpp", "trees.cpp")]
    return "\n".join(["#include <stdint.h>", *constants, *bodies])


FLAGS = shlex.split(
    "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-exceptions -fno-rtti -fPIC -shared -pthread -w"
)
TUNED: tuple[str | None, ...] = ("-march=native", "-mcpu=native", None)  # the first that works
SEAL = 32  # bytes of the checksum at the end of a compiled file, which loaders pass over
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


def buildable() -> bool:
    """Whether there is a C++ compiler."""
    return _compiler() is not None


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        told = {platform.processor()}
    return "\n".join([platform.system(), platform.machine(), *sorted(told)])


def load(program: str) -> ctypes.CDLL:
    """The program as loaded code, compiled unless it lies in the cache; a file that cannot be loaded is made anew."""
    if (compiler := _compiler()) is None:
        raise BuildError("no C++ compiler")
    command, version = compiler
    # -march=native: code of one machine may crash another that shares the cache
    parts = (program, *command, version, *FLAGS, *map(str, TUNED), _processor())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return _loaded(_writable(cache_folder().absolute() / "native") / f"{digest}.so", program, command)


@functools.cache
def _writable(folder: Path) -> Path:
    """The folder, or where it cannot be written to a private one of this process among temporary files."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _ours(folder):
            raise PermissionError("it is a link, or others can write to it")
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
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been cleared since
        if _trusted(path):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                log.debug("compiled code in %s cannot be loaded, it is made anew: %s", path, error)
        _compile(program, compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler's work cannot be used: {str(error)[:200]}") from error


def _trusted(path: Path) -> bool:
    """Whether this is a plain file of ours that nobody else can write, and as it was sealed: loading it runs it."""
    try:
        if not _ours(path) or not stat.S_ISREG(path.lstat().st_mode):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL]).digest() == content[-SEAL:]


def _ours(path: Path) -> bool:
    """Whether the file or folder itself, no link to one, is this user's, and others cannot write to it."""
    found = path.lstat()
    return os.name == "nt" or (found.st_uid == os.geteuid() and not found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode))


def _compile(program: str, compiler: tuple[str, ...], path: Path) -> None:
    """Compile to a file that appears whole; processes that do so at once make the same file, and the last one stays."""
    with tempfile.TemporaryDirectory(prefix="plausible-native-") as folder:
        text = Path(folder) / "perceptron.cpp"
        text.write_text(program)
        # renamed when it is whole: another process never loads half a file
        made = beside(path)
        try:
            # Arm's compilers want -mcpu, old ones know neither
            for tuned in TUNED:
                command = [*compiler, *FLAGS, *filter(None, [tuned]), str(text), "-o", str(made)]
                answer = subprocess.run(command, capture_output=True, text=True, timeout=WAITING, check=False)
                if answer.returncode == 0:
                    made.write_bytes((content := made.read_bytes()) + hashlib.sha256(content).digest())
                    made.chmod(0o700)
                    os.replace(made, path)
                    return
        finally:
            made.unlink(missing_ok=True)
    raise BuildError(f"{' '.join(compiler)} failed: {answer.stderr[-400:]}")
