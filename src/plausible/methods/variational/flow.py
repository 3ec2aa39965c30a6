"""Variational inference with normalising flows: one over all random weights, or one for the units of each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from plausible.blocks.families.flow import KINDS, FlowFamily, MultiplicativeFamily, flow_bytes
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, check_number, register
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
        _check_flow(self)

    def family(self, weights: Weights) -> FlowFamily:
        return FlowFamily(weights, self.transforms, self.hidden, self.kind)

    def memory(self, weights: Weights) -> tuple[int, str]:
        size, width = num_elements(weights), max(w.element_size() for w in weights.values())
        words = f"a flow over {size:,} random weights (where='last' infers fewer, MultiplicativeFlow has a flow for each layer)"
        return flow_bytes(size, self.transforms, self.hidden, self.kind, COPIES * width), words

    @classmethod
    def conforming(cls) -> Flow:
        return cls(epochs=250, batch_size=None, lr=Cosine(0.05), samples=2, initial_scale=0.1, transforms=1, hidden=16)


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
        _check_flow(self)
        check_number(self, "factor_scale", above=0)

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
        return cls(epochs=200, batch_size=None, lr=Cosine(0.06), samples=2, initial_scale=0.03, transforms=1, hidden=8)


def _check_flow(method: Flow | MultiplicativeFlow) -> None:
    check_count(method, "transforms", at_least=1)
    check_count(method, "hidden", at_least=1)
    if method.kind not in KINDS:
        who = type(method).__name__
        raise ValueError(f"{who}: kind must be one of {', '.join(map(repr, KINDS))}, got {method.kind!r}")
