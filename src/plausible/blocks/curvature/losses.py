"""F_b = −E_{y ~ p(y|f_b)} ∂² log p(y | f_b) / ∂f_b²: the expected Fisher of the network's outputs, never larger than it has to be.

    likelihood                F of one element                                            at the observed y
    ------------------------  ----------------------------------------------------------  -----------------
    Gaussian                  1/σ²                                                        the same
    Bernoulli                 p(1 − p)                                                    the same
    Poisson                   e^f                                                         the same
    Categorical               diag(p) − ppᵀ over the classes of a position                the same
    NegativeBinomial          μr/(μ + r)                                                  differs, positive
    StudentT                  (df + 1)/((df + 3)·σ²)                                      differs, may be negative
    HeteroscedasticStudentT   (df+1)/(df+3)/s², 2 df/(df+3)·sigmoid(f)²/s²               differs, may be indefinite
    HeteroscedasticGaussian   1/s² for the mean, 2·sigmoid(f)²/s² for the raw scale f     differs, may be indefinite
    LogVarianceGaussian       1/s² for the mean, 1/2 for the log variance                 differs, may be indefinite
    Scaled                    that of the likelihood inside                               as inside

"The same" means that the Gauss-Newton matrix is the Fisher (natural parameters: Martens 2020, section 9); where the Hessian at
the observed target differs, the expected Fisher is used, which is positive. A learned noise is held fixed.

Outputs are [B, *O], seen as [B, P, C]: P positions that do not interact, and one matrix [C, C] for each of them; n = P·C is the
number of outputs of one example. `noise` are the likelihood's own weights (`Model.noise`),
`mask` is shaped like the targets, True where one was observed: the others contribute nothing.

A likelihood of one's own says its Fisher by a method `fisher(outputs, noise)`, which returns a tensor shaped like the outputs
(elements that do not interact), or [*outputs.shape, C] for one matrix over the last axis, of length C. Without it the Hessian
of −log p at the observed `targets` takes its place where it is positive, and a TypeError says what to do where it is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.core import likelihoods, random
from plausible.core.likelihoods import Likelihood
from plausible.core.transforms import value_and_gradient


class OutputFisher(ABC):
    """F_b for b = 1 … B in one of three forms; what its methods give stands at the functions of the same names below."""

    shape: torch.Size  # that of the outputs, [B, *O]
    positions: int
    rank: int  # columns of the root of one position
    device: torch.device

    @property
    def num_roots(self) -> int:
        return self.positions * self.rank

    def root(self, columns: slice | None = None) -> Tensor:
        of = torch.arange(self.num_roots, device=self.device)[columns or slice(None)]
        position = of // self.rank
        values = self._columns(position, of % self.rank)  # [k, B, C]
        if self.positions > 1:
            # a column of one position is zero at all others
            here = F.one_hot(position, self.positions).to(values.dtype)  # [k, P]
            values = here[:, None, :, None] * values[:, :, None, :]
        return values.reshape(len(of), *self.shape)

    def shares(self, total: Tensor) -> Tensor:
        """max_j L[k, b]_j²/total_j of all columns of another root L, as uneven as it can easily be had: [B, K], for totals [P, C].

        With Σ_b diagonal() as the total: the share that a column has of what is known about any output, at most. Totals below
        1e-19, whose squares are no normal numbers, stand for nothing.
        """
        return self._shares(1 / total.clamp(min=1e-19)).flatten(1)

    def leading(self, columns: slice, total: Tensor) -> Tensor:
        """These of the columns of L, ordered for each example by their shares, the largest first: [k, B, *O]."""
        if self._order is None:
            # sorted once: slices of one batch are asked for one after the other
            self._order = self.shares(total).argsort(1, descending=True).T.contiguous()
        order = self._order[columns]  # [k, B]
        position = order // self.rank
        values = self._picked(position, order % self.rank)  # [k, B, C]
        if self.positions > 1:
            whole = values.new_zeros(*order.shape, self.positions, values.shape[-1])
            at = position[..., None, None].expand(*order.shape, 1, values.shape[-1])
            values = whole.scatter(2, at, values[:, :, None])
        return values.reshape(len(order), *self.shape)

    _order: Tensor | None = None

    def apply(self, vectors: Tensor) -> Tensor:
        if vectors.shape[1:] != self.shape:
            raise ValueError(
                f"vectors must have shape [V, *outputs.shape], here [V, {', '.join(map(str, self.shape))}], "
                f"got {list(vectors.shape)}"
            )
        placed = vectors.reshape(len(vectors), self.shape[0], self.positions, -1)  # [V, B, P, C]
        return self._apply(placed).reshape(vectors.shape)

    def summed(self, weight: Tensor | None = None) -> Tensor:
        if weight is not None and weight.shape != self.shape[:1]:
            raise ValueError(f"weight must have one number per example, [{self.shape[0]}], got {list(weight.shape)}")
        return _block_diagonal(self._summed(weight))

    def blocks(self) -> Tensor:
        return _block_diagonal(self._blocks())

    @abstractmethod
    def _combined(self, signs: Tensor) -> Tensor:
        """L ξ for ξ of one number for each output [k, B, P, C], with some root L of F_b: [k, B, P, C]."""

    @abstractmethod
    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        """These columns of the roots of these positions: [k, B, C]."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of F_b: [B, P, C]."""

    @abstractmethod
    def _shares(self, scale: Tensor) -> Tensor:
        """[B, P, rank], for what the squares [P, C] are multiplied by."""

    @abstractmethod
    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        """Columns of L, of their own for each example: [k, B, C] for numbers [k, B]."""

    @abstractmethod
    def _apply(self, vectors: Tensor) -> Tensor: ...

    @abstractmethod
    def _summed(self, weight: Tensor | None) -> Tensor:
        """Σ_b weight_b F_b, position by position: [P, C, C]."""

    @abstractmethod
    def _blocks(self) -> Tensor:
        """F_b, position by position: [B, P, C, C]."""


class Elementwise(OutputFisher):
    """F_b = diag(values_b), `values` [B, *O]."""

    def __init__(self, values: Tensor):
        self.shape, self._values = values.shape, values.reshape(len(values), -1)
        self.positions, self.rank = self._values.shape[1], 1
        self.device = values.device

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:  # noqa: ARG002
        return self._values.sqrt().T[position, :, None]

    def _combined(self, signs: Tensor) -> Tensor:
        return self._values.sqrt()[..., None] * signs

    def diagonal(self) -> Tensor:
        return self._values[..., None]

    def _shares(self, scale: Tensor) -> Tensor:
        return self._values[..., None] * scale

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:  # noqa: ARG002
        return self._values.sqrt().T.gather(0, position)[..., None]

    def _apply(self, vectors: Tensor) -> Tensor:
        return self._values[..., None] * vectors

    def _summed(self, weight: Tensor | None) -> Tensor:
        return (self._values.sum(0) if weight is None else weight.to(self._values) @ self._values)[:, None, None]

    def _blocks(self) -> Tensor:
        return self._values[..., None, None]


class Softmax(OutputFisher):
    """F = diag(p) − ppᵀ at each position, `probabilities` [B, *positions, C]; all zero where nothing was observed.

    diag(√p) − p√pᵀ is a root whose C columns span C − 1 dimensions, since √p is in its null space. A Householder reflection
    that takes √p to the last axis leaves C − 1 columns, R_ij = √p_j·(δ_ij − (p_i + s·δ_iC)/(1 + s)) with s = √p_C.

    The Cholesky factor is another root (Tanabe & Sagae 1992): with classes by falling probability and q_j = Σ_{i>j} p_i its
    column j is √(p_j q_j/(p_j + q_j))·(e_j − Σ_{i>j} p_i e_i/q_j), the class j against those that are less probable.
    """

    def __init__(self, probabilities: Tensor):
        self.shape = probabilities.shape
        self._p = probabilities.reshape(len(probabilities), -1, probabilities.shape[-1])
        self.positions, self.rank = self._p.shape[1], self._p.shape[2] - 1
        self.device = probabilities.device

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        p = self._p[:, position].movedim(1, 0)  # [k, B, C]
        s = p[..., -1:].sqrt()
        common = torch.cat([p[..., :-1], p[..., -1:] + s], -1) / (1 + s)
        unit = F.one_hot(column, self._p.shape[-1]).to(p.dtype)[:, None]
        return self._p[:, position, column].T[..., None].sqrt() * (unit - common)

    def _combined(self, signs: Tensor) -> Tensor:
        turned = self._p.sqrt() * signs
        return turned - self._p * turned.sum(-1, keepdim=True)

    @cached_property
    def _falling(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities in falling order, their classes, and q: [B, P, C] each."""
        p, classes = self._p.sort(-1, descending=True)
        # summed from the end: no difference is taken, so that what is left of almost 1 is exact
        return p, classes, F.pad(p[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))

    def diagonal(self) -> Tensor:
        return self._p - self._p.square()

    def _shares(self, scale: Tensor) -> Tensor:
        p, classes, q = self._falling
        tiny = torch.finfo(p.dtype).tiny  # a sure network has q = 0 exactly
        scale = scale.to(p).expand_as(self._p).gather(-1, classes)
        # the largest p_i²·scale_i behind each class, by a running maximum from the end
        others = F.pad((p.square() * scale)[..., 1:].flip(-1).cummax(-1).values.flip(-1), (0, 1))
        largest = torch.maximum(scale, others / q.square().clamp(min=tiny))
        return (p * (q / (p + q).clamp(min=tiny)) * largest)[..., :-1]

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        example = torch.arange(self.shape[0], device=self.device).expand_as(position)
        p, classes, q = (values[example, position] for values in self._falling)  # [k, B, C]
        tiny = torch.finfo(p.dtype).tiny
        here = column[..., None]
        after, at = q.gather(-1, here), p.gather(-1, here)
        place = torch.arange(p.shape[-1], device=self.device)
        values = torch.where(place > here, -p / after.clamp(min=tiny), (place == here).to(p.dtype))
        values = (at * (after / (at + after).clamp(min=tiny))).sqrt() * values
        return torch.zeros_like(values).scatter(-1, classes, values)

    def _apply(self, vectors: Tensor) -> Tensor:
        # (diag(p) − ppᵀ)v in two passes, never the matrix
        scaled = self._p * vectors
        return scaled - self._p * scaled.sum(-1, keepdim=True)

    def _summed(self, weight: Tensor | None) -> Tensor:
        p = self._p.movedim(1, 0)  # [P, B, C]
        # on one side: Σ w ppᵀ
        weighted = p if weight is None else p * weight.to(p)[:, None]
        return torch.diag_embed(weighted.sum(1)) - weighted.mT @ p

    def _blocks(self) -> Tensor:
        return torch.diag_embed(self._p) - self._p[..., :, None] * self._p[..., None, :]


class DenseFisher(OutputFisher):
    """F as it stands at each position: `matrices` [B, P, C, C] for outputs of `shape`."""

    def __init__(self, matrices: Tensor, shape: torch.Size):
        self.shape, self._matrices = shape, matrices
        self.positions, self.rank = matrices.shape[1], matrices.shape[-1]
        self.device = matrices.device

    @cached_property
    def _root(self) -> Tensor:
        # not Cholesky: F may be singular
        values, vectors = torch.linalg.eigh(self._matrices)
        return vectors * values.clamp(min=0).sqrt()[..., None, :]

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        return self._root[:, position, :, column]

    def _combined(self, signs: Tensor) -> Tensor:
        return torch.einsum("bpij,kbpj->kbpi", self._root, signs)

    def diagonal(self) -> Tensor:
        return self._matrices.diagonal(dim1=-2, dim2=-1)

    def _shares(self, scale: Tensor) -> Tensor:
        return (self._root.square() * scale.to(self._root)[..., None]).amax(-2)

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        example = torch.arange(self.shape[0], device=self.device).expand_as(position)
        return self._root[example, position, :, column]

    def _apply(self, vectors: Tensor) -> Tensor:
        return torch.einsum("bpij,vbpj->vbpi", self._matrices, vectors)

    def _summed(self, weight: Tensor | None) -> Tensor:
        f = self._matrices
        return f.sum(0) if weight is None else torch.einsum("b,bpij->pij", weight.to(f), f)

    def _blocks(self) -> Tensor:
        return self._matrices


class Sketch:
    """M random columns of each example in the place of all: S = L Ξ/√M, Ξ of random signs, so that E S Sᵀ = F_b.

    The entry ij of S Sᵀ has the variance (F_ii F_jj + F_ij² − 2 Σ_k L_ik² L_jk²)/M. `seed` is that of the signs.
    """

    def __init__(self, fisher: OutputFisher, columns: int, seed: int):
        self.shape, self.num_roots, self._fisher, self._seed = fisher.shape, columns, fisher, seed

    @cached_property
    def _all(self) -> Tensor:
        diagonal = self._fisher.diagonal()
        uniform = torch.rand((self.num_roots, *diagonal.shape), generator=random.generator(self._seed, 71))
        signs = (1 - 2 * (uniform < 0.5).to(diagonal.dtype)).to(diagonal.device)
        return self._fisher._combined(signs).reshape(self.num_roots, *self.shape) / self.num_roots**0.5

    def root(self, columns: slice | None = None) -> Tensor:
        return self._all[columns or slice(None)]


def _block_diagonal(matrices: Tensor) -> Tensor:
    count, size = matrices.shape[-3], matrices.shape[-1]
    spread = torch.diag_embed(matrices.movedim(-3, -1), dim1=-4, dim2=-2) if count > 1 else matrices
    return spread.reshape(*matrices.shape[:-3], count * size, count * size)


Noise = Mapping[str, Tensor] | None
Maybe = Tensor | None


# ---------------------------------------------------------------------------------------------------------------------
# The functions
def root(
    likelihood: Likelihood,
    outputs: Tensor,
    noise: Noise = None,
    mask: Maybe = None,
    *,
    targets: Maybe = None,
    columns: Any = None,
) -> Tensor:
    """R with Σ_k R[k, b] R[k, b]ᵀ = F_b: [K, B, *O], K as small as it can be; the slice `columns` asks for some of the k alone.

    K is n for elementwise likelihoods (1 for one output), and positions·(C − 1) for Categorical, whose F has rank C − 1.
    """
    return output_fisher(likelihood, outputs, noise, mask, targets).root(columns)


def apply(
    likelihood: Likelihood, outputs: Tensor, vectors: Tensor, noise: Noise = None, mask: Maybe = None, *, targets: Maybe = None
) -> Tensor:
    """F_b v_b for `vectors` [V, B, *O], without F_b: [V, B, *O], at O(VBn)."""
    return output_fisher(likelihood, outputs, noise, mask, targets).apply(vectors)


def summed(
    likelihood: Likelihood,
    outputs: Tensor,
    noise: Noise = None,
    weight: Maybe = None,
    mask: Maybe = None,
    *,
    targets: Maybe = None,
) -> Tensor:
    """Σ_b weight_b F_b: [n, n], without any [B, n, n]; O(Bn²) for Categorical, O(Bn) for elementwise likelihoods."""
    return output_fisher(likelihood, outputs, noise, mask, targets).summed(weight)


def blocks(
    likelihood: Likelihood, outputs: Tensor, noise: Noise = None, mask: Maybe = None, *, targets: Maybe = None
) -> Tensor:
    """F_b of each example: [B, n, n]; for few outputs."""
    return output_fisher(likelihood, outputs, noise, mask, targets).blocks()


def gradient(likelihood: Likelihood, outputs: Tensor, targets: Tensor, noise: Noise = None, mask: Maybe = None) -> Tensor:
    """∂ log p(y_b | f_b) / ∂f_b: [B, *O]. Not connected to a graph."""
    _, _, slope = value_and_gradient(lambda at: (_total(likelihood, at["f"], targets, noise, mask), ()), {"f": outputs})
    return slope["f"]


# ---------------------------------------------------------------------------------------------------------------------
# Which form a likelihood has
def output_fisher(
    likelihood: Likelihood, outputs: Tensor, noise: Noise = None, mask: Maybe = None, targets: Maybe = None
) -> OutputFisher:
    """F_b of these outputs [B, *O] in the form that its likelihood gives it."""
    expected = likelihood.target_shape(outputs.shape)  # a ValueError where the outputs cannot be right
    if mask is not None and tuple(mask.shape) != expected:
        raise ValueError(f"mask must be shaped like the targets, {list(expected)}, got {list(mask.shape)}")
    inside = likelihood
    while type(inside) is likelihoods.Scaled:  # f is what it was: only targets are moved and stretched
        inside = inside.likelihood
    if hasattr(inside, "fisher"):
        values = inside.fisher(outputs, noise)
    elif _behaves_as(inside, likelihoods.Categorical):
        return Softmax(outputs.softmax(-1) * (1 if mask is None else mask[..., None]))
    elif rule := next((rule for kind, rule in _rules().items() if _behaves_as(inside, kind)), None):
        values = rule(inside, outputs, noise)
    else:
        return _at_the_targets(likelihood, outputs, targets, noise, mask)
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
    return DenseFisher(values.reshape(len(outputs), -1, *values.shape[-2:]), outputs.shape)


def _behaves_as(likelihood: Likelihood, kind: type[Likelihood]) -> bool:
    """Whether it is of that kind, and no descendant with a density of its own."""
    if not isinstance(likelihood, kind):
        return False
    # a subclass that changed its density inherits no rule
    return all(getattr(type(likelihood), name) is getattr(kind, name) for name in ("__call__", "log_prob"))


def _rules() -> dict[type[Likelihood], Callable[[Any, Tensor, Noise], Tensor]]:
    """F of the elements, for likelihoods whose outputs do not interact."""
    # imported when it is asked for: moments are no part of most fits
    from plausible.blocks.moments.expectations import LogVarianceGaussian

    return {
        likelihoods.Bernoulli: lambda _, f, __: torch.sigmoid(f) * torch.sigmoid(-f),
        likelihoods.Gaussian: lambda law, f, noise: law(f, noise).scale.square().reciprocal(),
        likelihoods.StudentT: lambda law, f, noise: _of_student(law(f, noise)),
        likelihoods.Poisson: lambda _, f, __: f.exp(),
        # μr/(μ + r) = e^{f + log sigmoid(log r − f)}, which overflows nowhere
        likelihoods.NegativeBinomial: lambda law, f, noise: torch.exp(f + F.logsigmoid(law(f, noise).log_dispersion - f)),
        likelihoods.HeteroscedasticGaussian: lambda law, f, noise: _mean_and_scale(
            law(f, noise).scale, f.chunk(2, -1)[1].sigmoid()
        ),
        likelihoods.HeteroscedasticStudentT: lambda law, f, noise: _of_student_and_scale(
            law(f, noise), f.chunk(2, -1)[1].sigmoid()
        ),
        LogVarianceGaussian: lambda law, f, noise: _mean_and_scale(law(f, noise).scale, law(f, noise).scale / 2),
    }


def _of_student(given: Any) -> Tensor:
    return (given.df + 1) / (given.df + 3) / given.scale.square()


def _of_student_and_scale(given: Any, slope: Tensor) -> Tensor:
    """(df + 1)/(df + 3)/s² for the locations and 2 df/(df + 3)·(ds/df)²/s² for what gives the scales."""
    return torch.cat([_of_student(given), 2 * given.df / (given.df + 3) * (slope / given.scale).square()], -1)


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
def _total(likelihood: Likelihood, outputs: Tensor, targets: Tensor, noise: Noise, mask: Maybe) -> Tensor:
    each = likelihood.log_prob(outputs, targets, noise)
    return (each if mask is None else torch.where(mask, each, 0.0)).sum()


def _at_the_targets(likelihood: Likelihood, outputs: Tensor, targets: Maybe, noise: Noise, mask: Maybe) -> DenseFisher:
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
        total = _total(likelihood, at, targets, noise, mask)
        (slope,) = torch.autograd.grad(total, at, create_graph=True, materialize_grads=True)
        # examples do not interact, so that row i of all their Hessians is the gradient of one sum over them
        rows = [
            torch.autograd.grad(one, at, retain_graph=True, materialize_grads=True)[0]
            if one.requires_grad
            else torch.zeros_like(at)
            for one in slope.reshape(len(at), -1).sum(0)
        ]
    hessian = -torch.stack([row.reshape(len(at), -1) for row in rows], 1).detach()  # [B, n, n]
    smallest, largest = torch.linalg.eigvalsh(hessian)[:, [0, -1]].unbind(1)
    # rounding alone makes zero eigenvalues slightly negative
    tolerance = 100 * torch.finfo(hessian.dtype).eps * largest.abs().amax().clamp(min=torch.finfo(hessian.dtype).tiny)
    if not bool((smallest >= -tolerance).all()):
        raise TypeError(
            f"the Hessian of −log p under {name} is not positive at {int((smallest < -tolerance).sum())} of {len(at)} targets "
            f"(smallest eigenvalue {float(smallest.min()):.3g}), so that it is no curvature of a Gaussian: {advice}"
        )
    return DenseFisher(hessian[:, None], outputs.shape)
