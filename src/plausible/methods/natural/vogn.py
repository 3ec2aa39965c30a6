"""VOGN: natural-gradient variational inference whose curvature is that of the Gauss-Newton matrix, example by example."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from plausible.blocks.natural_gradients import Positive, blend, price
from plausible.blocks.stochastic import Noise
from plausible.core import random
from plausible.core.data import Batch, num_rows, select_rows
from plausible.core.model import Model
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, register
from plausible.core.transforms import transformed, value_and_gradient
from plausible.core.weights import Weights, num_elements, select, tree_map
from plausible.engine.method import Run, check_choice
from plausible.methods.natural.base import Draw, NaturalGradient, NaturalState, Priors

AT_ONCE = 2**24
"""Numbers in the gradients of the examples that are held at once, where `chunk_size` does not say."""
OUTPUTS = "outputs"


@register
@dataclass(frozen=True)
class VOGN(NaturalGradient):
    """h ← β₂h + (1 − β₂)·mean_i diag(J_iᵀ B_i J_i);  m ← m − lr·(g + δm)/(h + δ + damping);  σ² = 1/(λ(h + δ))

    Independent Gaussians over the weights by natural gradients, with the Gauss-Newton curvature of each example (Khan et al. 2018).

    J_i are the derivatives of the outputs (and of the likelihood's own weights) of example i at the drawn weights, B_i the
    second derivatives of −log p(y_i | outputs). "gauss-newton" estimates the diagonal without bias as (Jᵀv)∘(JᵀBv) with random
    signs v; "empirical" takes squared gradients, as the papers do, which is not the curvature of a quadratic loss. Examples
    see the network in evaluation mode. λ, δ, `lr` and priors as in `IVON`. Cost: `samples` times a forward and backward pass
    for the batch, and one forward and two backward passes (empirical: one) for its examples; memory for the gradients of
    `chunk_size` examples.
    """

    curvature: Literal["gauss-newton", "empirical"] = "gauss-newton"
    chunk_size: int | None = None

    name: ClassVar[str] = "vogn"
    positive: ClassVar[Positive] = staticmethod(blend)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "curvature", ("gauss-newton", "empirical"))
        if self.chunk_size is not None:
            check_count(self, "chunk_size", at_least=1)

    def prepare(self, model: Model, run: Run[Any]) -> None:
        example = next(iter(run.data.chunks(2)))
        fixed = {**select(model.initial, model.points), **model.buffers}
        try:
            noise = Noise(random.key(0, device=example.y.device), 0)
            self._of_examples(model, select(model.initial, model.random), fixed, example, noise)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                "network: VOGN needs the gradient of each example by torch.func.vmap, which cannot be had here: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}; use IVON, which needs none"
            ) from error

    def estimate(self, model: Model, state: NaturalState, draw: Draw, noise: Noise, priors: Priors, batch: Batch) -> Weights:
        """The mean over the batch of the examples' curvatures, and ε∇/σ of the priors that are not Gaussian."""
        fixed = {**select(state.weights, model.points), **draw.joint.buffers}
        estimates = self._of_examples(model, draw.weights, fixed, batch, noise)
        if (team := getattr(model, "team", None)) is not None:  # this rank has seen its part of the batch
            estimates = team.average(num_rows(batch.x), estimates)
        rest = [name for name, prior in priors.items() if prior is None]
        if rest:
            negative = lambda w: (-model.prior.log_prob(w) / model.num_data, ())  # noqa: E731
            _, _, slopes = value_and_gradient(negative, select(draw.weights, rest))
            ess = model.num_data / model.temperature
            for name in rest:
                estimates[name] = estimates[name] + price(draw.noise[name], slopes[name], state.curvature[name], ess)
        return estimates

    def _of_examples(self, model: Model, weights: Weights, fixed: Weights, batch: Batch, noise: Noise) -> Weights:
        """Mean_i weight_i · ĥ_i, some examples at a time."""
        rows = num_rows(batch.x)
        # a gradient for each example takes as many copies of the weights
        chunk = self.chunk_size or max(1, AT_ONCE // num_elements(weights))
        signs = {}
        if self.curvature == "gauss-newton":
            first = next(iter(weights.values()))
            # one set of signs for the whole batch, cut into chunks: the estimate does not depend on their size
            signs[OUTPUTS] = noise.signs(OUTPUTS, [rows, *model.output_shape], first)
            for name in model.likelihood_names:
                if name in weights:
                    signs[name] = noise.signs(name, [rows, *weights[name].shape], weights[name])
        total: Weights = {}
        for start in range(0, rows, chunk):
            part = select_rows(batch, slice(start, start + chunk))
            if signs:
                each = gauss_newton(model, weights, fixed, part, {n: sign[start : start + chunk] for n, sign in signs.items()})
            else:
                each = squared_gradients(model, weights, fixed, part)
            if part.weight is not None:
                each = {name: torch.einsum("i,i...->i...", part.weight.to(h), h) for name, h in each.items()}
            sums = {name: h.sum(0) / rows for name, h in each.items()}
            total = {name: total[name] + value for name, value in sums.items()} if total else sums
        return total

    @classmethod
    def conforming(cls) -> VOGN:
        return cls(epochs=120, batch_size=None, lr=Cosine(0.4), beta2=0.9, clip_radius=math.inf, samples=2, antithetic=True)


def gauss_newton(model: Model, weights: Weights, fixed: Weights, batch: Batch, signs: Weights) -> Weights:
    """(J_iᵀv_i)∘(J_iᵀB_iv_i) of each example, by name, [B, *shape]; its mean over random signs v_i [B, …] is diag(J_iᵀB_iJ_i).

    One forward pass with stacked weights, and two backward passes from it: by autograd in eager code, by `torch.func` elsewhere.
    """

    def place(w: Weights, x: Any) -> Weights:
        outputs = model.outputs({**w, **fixed}, tree_map(lambda leaf: leaf[None], x))[0]
        return {name: outputs if name == OUTPUTS else w[name] for name in signs}

    def loss(at: Weights, row: Batch) -> Tensor:
        noise = {name: (at if name in at else fixed)[name] for name in model.likelihood_names}
        each = model.likelihood.log_prob(at[OUTPUTS][None], row.y[None], noise)
        return -(each if row.mask is None else torch.where(row.mask[None], each, 0.0)).sum()

    def one(row: Batch, direction: Weights) -> tuple[Weights, Weights]:
        here, back = torch.func.vjp(lambda w: place(w, row.x), weights)  # type: ignore[misc]
        direction = {name: value.to(here[name].dtype) for name, value in direction.items()}
        curved = torch.func.grad(lambda at: _dot(torch.func.grad(loss)(at, row), direction))(here)
        return back(direction)[0], back(curved)[0]

    axes: Any = Batch(*(None if piece is None else 0 for piece in batch))  # type: ignore[arg-type]
    if transformed():
        first, second = torch.func.vmap(one, in_dims=(axes, 0), randomness="different")(batch, signs)
    else:
        rows = num_rows(batch.x)
        # a copy of the weights for each example makes their gradients those of the examples, in one backward pass
        leaves = {name: w.detach().expand(rows, *w.shape).requires_grad_() for name, w in weights.items()}
        with torch.enable_grad():
            here = torch.func.vmap(place, randomness="different")(leaves, batch.x)
            at = {name: value.detach().requires_grad_() for name, value in here.items()}
            slopes = _gradients(torch.func.vmap(loss, in_dims=(0, axes))(at, batch).sum(), at, create_graph=True)
            curved = _gradients(_dot(slopes, signs), at)
            first = _gradients(_dot(here, signs), leaves, retain_graph=True)
            second = _gradients(_dot(here, curved), leaves)
    return {name: value * second[name] for name, value in first.items()}


def squared_gradients(model: Model, weights: Weights, fixed: Weights, batch: Batch) -> Weights:
    """(∇ log p(y_i | x_i, w))² of each example, by name: [B, *shape]."""

    def loss(w: Weights, held: Weights, row: Batch) -> tuple[Tensor, tuple[()]]:
        return -model.log_likelihood({**w, **held}, tree_map(lambda leaf: leaf[None], row))[0], ()

    axes: Any = Batch(*(None if piece is None else 0 for piece in batch))  # type: ignore[arg-type]
    each = lambda row: value_and_gradient(loss, weights, fixed, row)[2]  # noqa: E731
    grads = torch.func.vmap(each, in_dims=(axes,), randomness="different")(batch)
    return {name: grad * grad for name, grad in grads.items()}


def _dot(one: Weights, other: Weights) -> Tensor:
    return functools.reduce(torch.add, [(one[name] * value).sum() for name, value in other.items()])


def _gradients(value: Tensor, leaves: Weights, **settings: Any) -> Weights:
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()), materialize_grads=True, **settings)))
