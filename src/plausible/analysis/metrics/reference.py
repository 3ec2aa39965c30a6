"""Nearness to a reference predictive, such as that of long Hamiltonian chains: no labels needed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plausible.analysis.metrics.inputs import class_probabilities


def agreement(predictive: Any, reference: Any) -> float:
    """1/N Σ 1[argmax_k p_k = argmax_k q_k]: the share of inputs with the same most probable class (Izmailov et al. 2021)."""
    p, q = _both(predictive, reference)
    return float((p.argmax(-1) == q.argmax(-1)).double().mean())


def total_variation(predictive: Any, reference: Any) -> float:
    """1/N Σ ½ Σ_k |p_k − q_k|: the most by which the two differ about any event, from 0 to 1 (Izmailov et al. 2021)."""
    p, q = _both(predictive, reference)
    return float(0.5 * (p - q).abs().sum(-1).mean())


def _both(predictive: Any, reference: Any) -> tuple[Tensor, Tensor]:
    p, q = class_probabilities(predictive, "predictive"), class_probabilities(reference, "reference")
    if p.shape != q.shape:
        raise ValueError(
            f"predictive has probabilities of shape {list(p.shape)}, reference {list(q.shape)}: expected the same inputs "
            "and classes in the same order; average draws first"
        )
    return p, q
