"""C++ for a perceptron's log joint: value, gradient and leapfrog paths, with all sizes as constants.

    h_l = a_l(W_l h_{l−1} + b_l),    δ_{l−1} = (W_lᵀ δ_l) ⊙ a'_{l−1},    ∂W_l = Σ_examples δ_l h_{l−1}ᵀ

Vector lanes are examples: a unit's values for all examples of a tile lie side by side, a block of units × lanes stays in
registers, activations are computed there, and gradients of weights are dot products along lanes. `source` writes the
constants of one network in front of `lanes.cpp` and `perceptron.cpp`, which are the same for all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ACTIVATIONS = ("identity", "tanh", "relu", "sigmoid", "silu", "softplus", "leaky_relu", "elu", "gelu_tanh", "gelu")
LIKELIHOODS = ("gaussian", "gaussian_learned", "gaussian_per_output", "bernoulli", "categorical")

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
class Layer:
    """One linear layer, where its weights lie in a position, and the activation behind it with its settings."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    activation: str = "identity"
    settings: tuple[float, float] = (0.0, 0.0)


def source(layers: Sequence[Layer], likelihood: str, size: int, noise: int | None, *, double: bool = False) -> str:
    """The whole program for these layers; `noise` is where a learned log scale lies, `size` the number of weights."""
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
        f"constexpr long SIZE = {size}, NOISE = {-1 if noise is None else noise};",
        numbers("real", "EXP2", EXP2_DOUBLE if double else EXP2_FLOAT),
        numbers("real", "ATANH", series),
        f"constexpr real ERF_END = {end};",
        numbers("real", "ERF", _error_function(end, degree)),
    ]
    bodies = [Path(__file__).with_name(name).read_text() for name in ("lanes.cpp", "perceptron.cpp", "trees.cpp")]
    return "\n".join(["#include <stdint.h>", *constants, *bodies])


__all__ = ["ACTIVATIONS", "LIKELIHOODS", "Layer", "source"]
