"""Multiplicative normalising flows: Gaussian weights with random factors for each unit, from a flow for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from plausible.blocks.families.flow import KINDS, flow_bytes
from plausible.blocks.families.multiplicative import MultiplicativeFamily
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, check_number, register
from plausible.core.weights import Weights
from plausible.engine.method import Traits
from plausible.methods.variational.reparameterised import COPIES, Reparameterised


@register
@dataclass(frozen=True)
class MultiplicativeFlow(Reparameterised):
    """w_ij = z_i μ_ij + σ_ij ε_ij,  z from a flow,  maximising  E log p(D | w) − KL(q(w | z) q(z) ‖ p(w) r(z | w))

    Gaussian weights whose input units or filters are multiplied by random factors from a flow (Louizos & Welling 2017).

    Each matrix has a factor for each of its inputs and each convolution kernel one for each filter; biases and other weights
    are independent Gaussians. A flow of `transforms` maps of `kind` makes the factors of one tensor dependent; the auxiliary
    r(z | w), a flow too, keeps the objective a bound on log p(D). Cost: that of weight sampling, and for a layer of n inputs
    two flows of about transforms·hidden·(4n + hidden) multiplications and parameters. Needs zuko: pip install
    'plausible[flows]'.
    """

    transforms: int = 2
    hidden: int = 32
    kind: Literal["iaf", "realnvp", "nsf"] = "iaf"
    factor_scale: float = 0.1

    name: ClassVar[str] = "multiplicative-flow"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits,
        shaping=("factor_scale",),
        bias="weights of different tensors, and outputs given the factors, are independent",
        tolerance=0.5,  # short runs end between the mean-field optimum and the posterior
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "transforms", at_least=1)
        check_count(self, "hidden", at_least=1)
        check_number(self, "factor_scale", above=0)
        if self.kind not in KINDS:
            raise ValueError(f"MultiplicativeFlow: kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")

    def family(self, weights: Weights) -> MultiplicativeFamily:
        return MultiplicativeFamily(weights, self.transforms, self.hidden, self.kind, self.factor_scale)

    def memory(self, weights: Weights) -> tuple[int, str]:
        needed = 0
        for weight in weights.values():
            if weight.ndim >= 2:
                units = weight.shape[1 if weight.ndim == 2 else 0]
                settings = (self.transforms, self.hidden, self.kind, COPIES * weight.element_size())
                needed += flow_bytes(units, *settings) + flow_bytes(units, *settings, context=units)
        return needed, "its flows (a smaller hidden or fewer transforms need less)"

    @classmethod
    def conforming(cls) -> MultiplicativeFlow:
        # long enough to find the mean and the size of the variances
        return cls(epochs=250, batch_size=None, lr=Cosine(0.05), samples=2, initial_scale=0.03, transforms=1, hidden=8)
