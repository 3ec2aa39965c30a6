"""Matrix-normal variational inference: covariances between the rows and between the columns of each weight matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from plausible.blocks.families.gaussian import MatrixNormalFamily
from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.engine.method import Traits, check_choice
from plausible.methods.variational.reparameterised import COPIES, Reparameterised

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class MatrixNormal(Reparameterised):
    """q(W) = MN(M, A Aᵀ, B Bᵀ),  W = M + A E Bᵀ,  maximising  E_q log p(D | w) − KL(q ‖ p)

    A Gaussian for each weight matrix with one covariance between its rows and one between its columns (Louizos & Welling 2016).

    Convolution kernels are matrices [outputs, inputs × kernel]; weights with fewer than two axes are independent Gaussians, and
    different tensors are independent. `covariance` is "full" (lower triangular A and B) or "diagonal" (a scale for each row and
    each column: fewer numbers than the weights themselves). The entropy is exact. Cost for a weight [n, p]: n² + p² numbers and
    np(n + p) multiplications a draw with "full", n + p and np with "diagonal".
    """

    covariance: Literal["full", "diagonal"] = "full"

    name: ClassVar[str] = "matrix-normal"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits, bias="Kronecker covariances inside each weight matrix, none between different ones"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "covariance", ("full", "diagonal"))

    def family(self, weights: Weights) -> MatrixNormalFamily:
        return MatrixNormalFamily(weights, self.covariance)

    def memory(self, weights: Weights) -> tuple[int, str]:
        shapes = {name: shape for name, shape in self.family(weights).shapes.items() if shape}
        if self.covariance == "diagonal" or not shapes:
            return 0, ""
        sizes = {name: (n * n + p * p) * weights[name].element_size() for name, (n, p) in shapes.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        words = f"full covariances of rows and columns, the largest for {largest!r} of shape {tuple(weights[largest].shape)}"
        return COPIES * sum(sizes.values()), f"{words} (covariance='diagonal' needs hardly any)"

    @classmethod
    def conforming(cls) -> MatrixNormal:
        return cls(epochs=200, batch_size=None, lr=Cosine(0.1), initial_scale=0.1, landing=True)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        # the weight has one row, whose covariance is then all there is
        return problem.posterior() if self.covariance == "full" else problem.mean_field()
