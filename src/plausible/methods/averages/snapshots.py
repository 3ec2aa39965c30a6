"""Snapshot ensembles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plausible.core.serialise import register
from plausible.methods.averages.cycles import PathEnsemble


@register
@dataclass(frozen=True)
class Snapshots(PathEnsemble):
    """p(y | x, D) ≈ (1/K) Σ_k p(y | x, θ_k),  θ_k at the end of wave k of the rate lr/2·(cos(π t) + 1)   (Huang et al. 2017)

    Train one, get several: warm restarts lead from one minimum to the next.

    `optimiser` goes through `cycles`, each of which begins at the rate `lr` and ends at 0: the weights there are a member. The
    paper begins at a new network (`mode=None`) and gives each cycle a whole training; here `mode` trains first, with rows held out,
    and cycles are short, so that small data are not learned by heart. Batch norm gets its statistics anew for each member, in a
    last pass over the data. `epochs` are those of all cycles together (None: 4 a cycle, on small data as many as 50 steps take).
    Cost: that of the training and of the cycles; memory: `cycles` copies of the weights.
    """

    name: ClassVar[str] = "snapshots"

    def wave(self, progress: Tensor) -> Tensor:
        return (torch.cos(math.pi * progress) + 1) / 2
