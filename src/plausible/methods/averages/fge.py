"""Fast geometric ensembles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plausible.core.serialise import check_number, register
from plausible.methods.averages.cycles import PathEnsemble


@register
@dataclass(frozen=True)
class FGE(PathEnsemble):
    """p(y | x, D) ≈ (1/K) Σ_k p(y | x, θ_k),  θ_k where the triangular rate of cycle k is lowest   (Garipov et al. 2018)

    An ensemble for little more than the price of one network: members lie along a path of low loss.

    After the training by `mode` (None: from the weights as they are) `optimiser` goes on through `cycles`, in each of which the
    rate falls from `lr` to `lr`·`lowest_share` and rises again, linearly. The weights in the middle of a cycle are a member. Batch
    norm gets its statistics anew for each, in a last pass over the data. `epochs` are those of all cycles together (None: 4 a
    cycle, on small data as many as 50 steps take). Cost: that of the training and of the cycles; memory: `cycles` copies of the
    weights.
    """

    lowest_share: float = 0.01

    name: ClassVar[str] = "fge"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "lowest_share", above=0, below=1)

    def wave(self, progress: Tensor) -> Tensor:
        away = (2 * progress - 1).abs()  # from the middle
        return self.lowest_share + (1 - self.lowest_share) * away

    def lowest(self, length: int) -> int:
        return (length + 1) // 2
