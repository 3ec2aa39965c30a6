"""F_b = −E_{y ~ p(y|f_b)} ∂² log p(y | f_b) / ∂f_b²: the expected Fisher of the network's outputs, never larger than it has to be.

    likelihood                F of one element                                            at the observed y
    ------------------------  ----------------------------------------------------------  -----------------
    Gaussian                  1/σ²                                                        the same
    Bernoulli                 p(1 − p)                                                    the same
    Poisson                   e^f                                                         the same
    Categorical               diag(p) − ppᵀ over the classes of a position                the same
    NegativeBinomial          μr/(μ + r)                                                  differs, positive
    StudentT                  (df + 1)/((df + 3)·σ²)                                      differs, may be negative
    HeteroscedasticGaussian   1/s² for the mean, 2·sigmoid(f)²/s² for the raw scale f     differs, may be indefinite
    LogVarianceGaussian       1/s² for the mean, 1/2 for the log variance                 differs, may be indefinite
    Scaled                    that of the likelihood inside                               as inside

"The same" means that the Gauss-Newton matrix is the Fisher (natural parameters: Martens 2020, section 9); where the Hessian at
the observed target differs, the expected Fisher is used, which is positive. A learned noise is held fixed.

Outputs are [B, *O], and n is the number of outputs of one example. `noise` are the likelihood's own weights (`Model.noise`),
`mask` is shaped like the targets, True where one was observed: the others contribute nothing.

A likelihood of one's own says its Fisher by a method `fisher(outputs, noise)`, which returns a tensor shaped like the outputs
(elements that do not interact), or [*outputs.shape, C] for one matrix over the last axis, of length C. Without it the
Hessian of −log p at the observed `targets` takes its place where it is positive, and a TypeError says what to do where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.curvature.output_fisher import Dense, Elementwise, OutputFisher, Softmax
from plausible.core import likelihoods
from plausible.core.likelihoods import Likelihood
from plausible.core.transforms import value_and_gradient

Noise = Mapping[str, Tensor] | None


# ---------------------------------------------------------------------------------------------------------------------
# The functions


def root(
    likelihood: Likelihood,
    outputs: Tensor,
    noise: Noise = None,
    mask: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    columns: slice | None = None,
) -> Tensor:
    """R with Σ_k R[k, b] R[k, b]ᵀ = F_b: [K, B, *O], K as small as it can be; `columns` asks for some of the k alone.

    K is n for elementwise likelihoods (1 for one output), and positions·(C − 1) for Categorical, whose F has rank C − 1.
    """
    return output_fisher(likelihood, outputs, noise, mask, targets).root(columns)


def num_roots(likelihood: Likelihood, outputs: Tensor, noise: Noise = None, *, targets: Tensor | None = None) -> int:
    """K, the number of columns that `root` gives for such outputs."""
    return output_fisher(likelihood, outputs[:1], noise, None, None if targets is None else targets[:1]).num_roots


def sketch(
    likelihood: Likelihood,
    outputs: Tensor,
    signs: Tensor,
    noise: Noise = None,
    mask: Tensor | None = None,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """R_b ξ_b for ξ = `signs` [V, B, *O], R_bR_bᵀ = F_b: where ξ is noise of unit covariance, E[R_bξ_b(R_bξ_b)ᵀ] = F_b.

    One column where `root` has K of them: for many classes, at O(VBn).
    """
    return output_fisher(likelihood, outputs, noise, mask, targets).sketch(signs)


def apply(
    likelihood: Likelihood,
    outputs: Tensor,
    vectors: Tensor,
    noise: Noise = None,
    mask: Tensor | None = None,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """F_b v_b for `vectors` [V, B, *O], without F_b: [V, B, *O], at O(VBn)."""
    return output_fisher(likelihood, outputs, noise, mask, targets).apply(vectors)


def summed(
    likelihood: Likelihood,
    outputs: Tensor,
    noise: Noise = None,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Σ_b weight_b F_b: [n, n], without any [B, n, n]; O(Bn²) for Categorical, O(Bn) for elementwise likelihoods."""
    return output_fisher(likelihood, outputs, noise, mask, targets).summed(weight)


def blocks(
    likelihood: Likelihood, outputs: Tensor, noise: Noise = None, mask: Tensor | None = None, *, targets: Tensor | None = None
) -> Tensor:
    """F_b of each example: [B, n, n]; for few outputs."""
    return output_fisher(likelihood, outputs, noise, mask, targets).blocks()


def gradient(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, noise: Noise = None, mask: Tensor | None = None
) -> Tensor:
    """∂ log p(y_b | f_b) / ∂f_b: [B, *O]. Not connected to a graph."""
    return value_and_gradient(lambda at: (_total(likelihood, at["outputs"], targets, noise, mask), ()), {"outputs": outputs})[
        2
    ]["outputs"]


# ---------------------------------------------------------------------------------------------------------------------
# Which form a likelihood has


def output_fisher(
    likelihood: Likelihood, outputs: Tensor, noise: Noise = None, mask: Tensor | None = None, targets: Tensor | None = None
) -> OutputFisher:
    """F_b of these outputs [B, *O] in the form that its likelihood gives it."""
    expected = likelihood.target_shape(outputs.shape)  # a ValueError where the outputs cannot be right
    if mask is not None and tuple(mask.shape) != expected:
        raise ValueError(f"mask must be shaped like the targets, {list(expected)}, got {list(mask.shape)}")
    inside = likelihood
    while type(inside) is likelihoods.Scaled:  # f is what it was: only targets are moved and stretched
        inside = inside.likelihood
    own = getattr(inside, "fisher", None)
    if own is None and _behaves_as(inside, likelihoods.Categorical):
        return Softmax(outputs.softmax(-1) * (1 if mask is None else mask[..., None]))
    rule = next((rule for kind, rule in _rules().items() if _behaves_as(inside, kind)), None)
    if own is None and rule is None:
        return _at_the_targets(likelihood, outputs, targets, noise, mask)
    values = own(outputs, noise) if own is not None else rule(inside, outputs, noise)  # type: ignore[misc]
    if values.shape == outputs.shape:
        return Elementwise(values if mask is None else values * _for_outputs(mask, outputs, inside))
    if values.shape != (*outputs.shape, outputs.shape[-1]) or outputs.ndim < 2:
        raise ValueError(
            f"{type(inside).__name__}.fisher must return a tensor shaped like the outputs, {list(outputs.shape)}, or one matrix "
            f"over their last axis, {[*outputs.shape, *outputs.shape[-1:]]}; got {list(values.shape)}"
        )
    if mask is not None:
        if mask.shape != outputs.shape[:-1]:
            raise _unclear_mask(mask, outputs, inside)
        values = values * mask[..., None, None]
    return Dense(values.reshape(len(outputs), -1, *values.shape[-2:]), outputs.shape)


def _behaves_as(likelihood: Likelihood, kind: type[Likelihood]) -> bool:
    """Whether it is of that kind, and no descendant with a density of its own."""
    if not isinstance(likelihood, kind):
        return False
    return all(getattr(type(likelihood), name) is getattr(kind, name) for name in ("__call__", "log_prob"))


def _rules() -> dict[type[Likelihood], Callable[[Any, Tensor, Noise], Tensor]]:
    """F of the elements, for likelihoods whose outputs do not interact."""
    from plausible.blocks.moments.expectations import LogVarianceGaussian

    return {
        likelihoods.Bernoulli: lambda _, f, __: torch.sigmoid(f) * torch.sigmoid(-f),
        likelihoods.Gaussian: lambda own, f, noise: own(f, noise).scale.square().reciprocal(),
        likelihoods.StudentT: lambda own, f, noise: (own.df + 1) / (own.df + 3) * own(f, noise).scale.square().reciprocal(),
        likelihoods.Poisson: lambda _, f, __: f.exp(),
        likelihoods.NegativeBinomial: _negative_binomial,
        likelihoods.HeteroscedasticGaussian: lambda own, f, noise: _mean_and_scale(
            own(f, noise).scale, f.chunk(2, -1)[1].sigmoid()
        ),
        LogVarianceGaussian: lambda own, f, noise: _mean_and_scale(own(f, noise).scale, own(f, noise).scale / 2),
    }


def _negative_binomial(likelihood: likelihoods.NegativeBinomial, outputs: Tensor, noise: Noise) -> Tensor:
    """μr/(μ + r) = e^{f + log sigmoid(log r − f)}, which overflows nowhere."""
    return torch.exp(outputs + F.logsigmoid(likelihood(outputs, noise).log_dispersion - outputs))


def _mean_and_scale(scale: Tensor, slope: Tensor) -> Tensor:
    """1/s² for the means and 2(ds/df)²/s² for what gives the scales: they do not interact."""
    return torch.cat([scale.square().reciprocal(), 2 * (slope / scale).square()], -1)


def _for_outputs(mask: Tensor, outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """The mask of targets as one of outputs: the same, one for a whole last axis, or one for means and scales alike."""
    if mask.shape == outputs.shape:
        return mask
    if mask.shape == outputs.shape[:-1]:
        return mask[..., None]
    if (*mask.shape[:-1], 2 * mask.shape[-1]) == outputs.shape:
        return torch.cat([mask, mask], -1)
    raise _unclear_mask(mask, outputs, likelihood)


def _unclear_mask(mask: Tensor, outputs: Tensor, likelihood: Likelihood) -> ValueError:
    return ValueError(
        f"mask of shape {list(mask.shape)} does not say which outputs of shape {list(outputs.shape)} it leaves out under "
        f"{type(likelihood).__name__}.fisher: drop the examples that were not fully observed"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Likelihoods that do not say their Fisher


def _total(likelihood: Likelihood, outputs: Tensor, targets: Tensor, noise: Noise, mask: Tensor | None) -> Tensor:
    each = likelihood.log_prob(outputs, targets, noise)
    return (each if mask is None else torch.where(mask, each, 0.0)).sum()


def _at_the_targets(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, noise: Noise, mask: Tensor | None
) -> Dense:
    """−∂² log p(y_b | f_b)/∂f_b² at the observed targets, n backward passes; TypeError where it is not positive."""
    name = type(likelihood).__name__
    advice = (
        f"give {name} a method fisher(outputs, noise) that returns −E ∂² log p(y | f)/∂f², shaped like the outputs where they "
        "do not interact, else [*outputs.shape, C] over their last axis"
    )
    if targets is None:
        raise TypeError(f"{name} does not say its Fisher, and there are no targets to take a Hessian at: {advice}")
    with torch.enable_grad():
        at = outputs.detach().requires_grad_()
        slope = torch.autograd.grad(
            _total(likelihood, at, targets, noise, mask), at, create_graph=True, materialize_grads=True
        )[0]
        rows = [
            torch.autograd.grad(one, at, retain_graph=True, materialize_grads=True)[0].reshape(len(at), -1)
            if one.requires_grad
            else torch.zeros_like(at).reshape(len(at), -1)
            for one in slope.reshape(len(at), -1).sum(0)
        ]
    hessian = -torch.stack(rows, 1).detach()  # [B, n, n]
    smallest, largest = torch.linalg.eigvalsh(hessian)[:, [0, -1]].unbind(1)
    tolerance = 100 * torch.finfo(hessian.dtype).eps * largest.abs().amax().clamp(min=torch.finfo(hessian.dtype).tiny)
    if not bool((smallest >= -tolerance).all()):
        raise TypeError(
            f"the Hessian of −log p under {name} is not positive at {int((smallest < -tolerance).sum())} of {len(at)} targets "
            f"(smallest eigenvalue {float(smallest.min()):.3g}), so that it is no curvature of a Gaussian: {advice}"
        )
    return Dense(hessian[:, None], outputs.shape)
