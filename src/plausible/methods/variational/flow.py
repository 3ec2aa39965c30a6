"""Variational inference with a normalising flow over all random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from plausible.blocks.families.flow import KINDS, FlowFamily, flow_bytes
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights, num_elements
from plausible.engine.method import Traits
from plausible.methods.variational.reparameterised import COPIES, Reparameterised


@register
@dataclass(frozen=True)
class Flow(Reparameterised):
    """w = μ + σ ∘ f_K(… f_1(ε)),  ε ~ N(0, I),  maximising  E_q log p(D | w) − KL(q ‖ p)

    A normalising flow over all random weights together (Rezende & Mohamed 2015), for small networks.

    f is made of `transforms` autoregressive maps, whose coefficients come from masked networks with two layers of `hidden`
    units. `kind` is "iaf" (Kingma et al. 2016), "realnvp" (affine coupling) or "nsf" (rational-quadratic splines). Cost of a
    draw: for P random weights about transforms·hidden·(3P + hidden) multiplications (24P with "nsf"), as many parameters.
    Needs zuko: pip install 'plausible[flows]'.
    """

    transforms: int = 3
    hidden: int = 32
    kind: Literal["iaf", "realnvp", "nsf"] = "iaf"

    name: ClassVar[str] = "flow"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits, bias="what the flow can express, and how far it was trained", tolerance=0.1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "transforms", at_least=1)
        check_count(self, "hidden", at_least=1)
        if self.kind not in KINDS:
            raise ValueError(f"Flow: kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")

    def family(self, weights: Weights) -> FlowFamily:
        return FlowFamily(weights, self.transforms, self.hidden, self.kind)

    def memory(self, weights: Weights) -> tuple[int, str]:
        size, width = num_elements(weights), max(w.element_size() for w in weights.values())
        words = f"a flow over {size:,} random weights (where='last' infers fewer, MultiplicativeFlow has a flow for each layer)"
        return flow_bytes(size, self.transforms, self.hidden, self.kind, COPIES * width), words

    @classmethod
    def conforming(cls) -> Flow:
        return cls(epochs=400, batch_size=None, lr=Cosine(0.03), samples=2, initial_scale=0.1, transforms=1, hidden=16)
