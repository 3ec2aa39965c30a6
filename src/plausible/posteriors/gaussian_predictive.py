"""The predictive of a Gaussian over functions: p(y | x) = ∫ p(y | f) N(f; m(x), V(x)) df, integrated and not sampled.

Linearised Laplace posteriors and Gaussian processes know mean and covariance of f(x). Numbers and counts are integrated by
`plausible.gaussian_integrals`; this file has the class and what is particular to class probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from plausible.blocks.moments.gaussians import Moments
from plausible.core import likelihoods, random
from plausible.core.likelihoods import Likelihood
from plausible.core.special import widest
from plausible.core.turns import cached
from plausible.posteriors import gaussian_integrals as integrals
from plausible.posteriors.predictive import _COPIES, BLOCK_BYTES, BUDGET_BYTES, Draws, Predictive, _Summary

Way = Literal["integral", "probit", "bridge"]
CLASSES = ("classes", "binary")
_UNDERFLOW = 1e-30  # probabilities below are summed by their logarithms
_GROUP = 64  # inputs whose noise comes out of one generator, where draws are made here


class GaussianPredictive(Predictive):
    """p(y | x) = ∫ p(y | f) N(f; m(x), V(x)) df for N inputs: what `Predictive` answers, without the noise of finitely many draws.

    `moments(rows)` gives, for a slice of the inputs, the mean [n, *O] of the outputs and their covariance [n, P, P] with P = ΠO, or
    variances [n, *O] where outputs are independent or P² is too much. `noise` holds the likelihood's own weights, if it has any:
    points, `likelihood.log_scale` of shape () or (O,). `draws` is a source as that of `Predictive`, coherent over the inputs, for
    `functions` and `sample`; without it inputs are drawn independently from N(m, V), by `seed`.

    Gaussian noise: exact, y ~ N(m, V + σ²). Other numbers and counts: see `plausible.gaussian_integrals`. Classes, by `way`:

    "integral"  E softmax(f): for two classes by the trapezoidal rule over the log odds (129 nodes, error below 1e-7 up to a
                deviation of 10), for more over `nodes` points that fill N(m, V) evenly. Cost: nodes·N·C², with variances nodes·N·C.
    "probit"    σ(κm) with κ = (1 + πv/8)^−½ (MacKay 1992), for C > 2 classes softmax(κ_c·m_c): off by up to 0.02 for two classes.
                `epistemic` and `mutual_information` are those of the integral, the aleatoric parts what they leave. Cost: N·C.
    "bridge"    the Dirichlet with α_c = (1 − 2/C + e^{m_c}·Σ_k e^{−m_k}/C²)/v_c, m and v those of f less its mean over classes
                (MacKay 1998; Hobbhahn, Kristiadi & Hennig 2022, who condition on that mean being 0): all parts in closed form.
                Coarse: it matches the variances, and for two classes its mean is softmax(m) whatever V is. Cost: N·C².

    Targets of one input are explained together by `log_prob`, V being their covariance; by "probit" and "bridge" each on its own.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        moments: Callable[[slice], tuple[Tensor, Tensor]],
        *,
        num_inputs: int,
        output_shape: tuple[int, ...],
        noise: Mapping[str, Tensor] | None = None,
        way: Way = "integral",
        draws: Callable[[slice], Draws] | None = None,
        num_draws: int = 100,
        nodes: int | None = None,
        seed: int = 0,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        sizes: Any = {"num_inputs": num_inputs, "num_draws": num_draws, "output_shape": output_shape}
        super().__init__(likelihood, draws or self._independent, budget_bytes=budget_bytes, **sizes)
        if way not in get_args(Way):
            raise ValueError(f"way must be one of {', '.join(map(repr, get_args(Way)))}, got {way!r}")
        if way != "integral" and not isinstance(likelihood, likelihoods.Categorical | likelihoods.Bernoulli):
            raise ValueError(
                f"way={way!r} is for the probabilities of Categorical and Bernoulli, got {likelihood}: use way='integral', which "
                "has closed forms of its own"
            )
        if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 2):
            raise ValueError(f"nodes must be a whole number of at least 2, or None, got {nodes!r}")
        self.noise, self.way, self.seed = dict(noise or {}), way, seed
        self._given, self._nodes, self._size = moments, nodes, math.prod(self.output_shape)
        self._kept: Moments | None = None

    @classmethod
    def from_moments(
        cls,
        mean: Tensor,
        covariance: Tensor,
        likelihood: Likelihood,
        noise: Mapping[str, Tensor] | None = None,
        **settings: Any,
    ) -> GaussianPredictive:
        """Of means [N, *O] with covariances [N, P, P] or variances [N, *O] that are there already; `settings` as of the class."""
        if not isinstance(mean, Tensor) or mean.ndim < 1 or not mean.is_floating_point():
            got = f"{mean.dtype} {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(f"mean must be a floating-point tensor of shape [inputs, ...], got {got}")
        moments = lambda rows: (mean[rows], covariance[rows])  # noqa: E731
        return cls(likelihood, moments, num_inputs=len(mean), output_shape=tuple(mean.shape[1:]), noise=noise, **settings)

    def __repr__(self) -> str:
        way = f", way={self.way!r})" if self.likelihood.kind in CLASSES else ")"
        return super().__repr__().removesuffix(")") + way

    @property
    def _held(self) -> Tensor | None:
        return super()._held if self._kept is None else self._kept.mean

    def _moments(self, rows: slice) -> Moments:
        """Mean [n, P] and covariance [n, P, P] or variances [n, P], as they are given."""
        if self._kept is not None:
            return Moments(*(part[rows] for part in self._kept))  # type: ignore[index]
        with torch.no_grad():
            mean, spread = self._given(rows)
        count = rows.stop - rows.start
        matrix, flat = (count, self._size, self._size), (count, *self.output_shape)
        if tuple(mean.shape) != flat or tuple(spread.shape) not in (matrix, flat):
            raise ValueError(
                f"moments gave shapes {list(mean.shape)} and {list(spread.shape)} for {rows}, expected the mean {list(flat)}, and "
                f"covariances {list(matrix)} or variances {list(flat)}"
            )
        self._dtype = self._returned(mean)
        spread = spread.reshape(matrix if tuple(spread.shape) == matrix else (count, self._size))
        return Moments(mean.detach().reshape(count, self._size), spread.detach())

    @cached
    def _full(self) -> bool:
        """Whether there are covariances, asked of the first input."""
        covariance = self._moments(slice(0, min(1, self.num_inputs))).covariance
        return covariance is not None and covariance.ndim == 3

    def _functions(self, each: int) -> Iterator[tuple[slice, Moments]]:
        """Slices of the inputs with the moments of f in float64; so few that `each` numbers for each of them fit the block."""
        # moments are kept where they fit, since each question would propagate them again
        numbers = self._size * (1 + (self._size if self._full else 1))
        if self._kept is None and 8 * numbers * self.num_inputs <= self._budget:
            parts = [self._moments(rows) for rows in self._slices(numbers)]
            self._kept = Moments(*(torch.cat(column) for column in zip(*parts)))  # type: ignore[arg-type]
        for rows in self._slices(max(each, numbers)):
            f = self._moments(rows)
            yield rows, Moments(*(part.to(widest(part.device)) for part in f))  # type: ignore[union-attr]

    def _slices(self, each: int) -> Iterator[slice]:
        step = max(1, min(BLOCK_BYTES, self._budget) // (8 * _COPIES * max(each, 1)))
        for start in range(0, max(self.num_inputs, 1), step):
            yield slice(start, min(start + step, self.num_inputs))

    def _wide(self, f: Moments) -> dict[str, Tensor]:
        """The likelihood's weights as wide as the moments."""
        return {name: weight.to(f.mean) for name, weight in self.noise.items()}

    def _independent(self, rows: slice) -> Draws:
        """Draws of N(m, V), each input on its own: a function of the seed and the number of the input."""
        f = self._moments(rows)
        # whole groups are drawn, so that an input's noise does not depend on the block it comes in
        groups = range(rows.start // _GROUP, -(-rows.stop // _GROUP))
        shape = (self.num_draws, _GROUP, self._size)
        drawn = [random.normals(self.seed, 29, group, count=math.prod(shape), like=f.mean) for group in groups or range(1)]
        start = rows.start - groups.start * _GROUP
        z = torch.cat([part.reshape(shape) for part in drawn], 1)[:, start : start + len(f.mean)]
        if (covariance := integrals.matrix(f)) is not None:
            half = integrals.root(covariance.to(widest(covariance.device))).to(z)
            noise = torch.einsum("npk,snk->snp", half, z)
        else:
            noise = f.variance.clamp(min=0).sqrt() * z
        outputs = (f.mean + noise).reshape(self.num_draws, len(f.mean), *self.output_shape)
        return Draws(outputs, {n: w.expand(self.num_draws, *w.shape) for n, w in self.noise.items()})

    def _laws(self, copies: int = 1) -> Iterator[tuple[slice, distributions.Distribution]]:
        for rows, f in self._functions(copies * self._work):
            yield rows, integrals.law(self.likelihood, f, self.output_shape, self._wide(f))

    def _first_law(self) -> distributions.Distribution:
        f = self._moments(slice(0, min(1, self.num_inputs)))
        return integrals.law(self.likelihood, f, self.output_shape, self._wide(f))

    def _law_of_functions(self) -> tuple[Tensor, Tensor] | None:
        return (self.mean, self.epistemic.sqrt()) if integrals.located(self.likelihood) else None

    @property
    def _work(self) -> int:
        """Numbers that the integral over the outputs of one input holds."""
        if isinstance(likelihoods.unscaled(self.likelihood), likelihoods.Gaussian):
            return self._size
        return self._size * max(integrals.NODES, self._nodes or integrals.scattered_count(self._size))

    @cached
    def _summary(self) -> _Summary:
        if self.likelihood.kind in CLASSES:
            return _Summary(*self._binary_last(self._classes[1:]))
        blocks = self._functions(self._work)
        return _Summary(
            *self._joined(integrals.summary(self.likelihood, f, self.output_shape, self._wide(f)) for _, f in blocks)
        )

    @property
    def mean(self) -> Tensor:
        return self._binary_last(self._probit[1:2])[0] if self.way == "probit" else self._summary.mean

    @property
    def entropy(self) -> Tensor:
        return self._probit[2] if self.way == "probit" else self._entropies("entropy")[0]

    def _log_density(self, targets: Tensor, observed: Tensor | None = None) -> Tensor:
        # a single target, or independent ones: the joint density is the product of the marginal ones
        alone = targets.numel() == len(targets) or not self._full or self.way != "integral"
        if self.likelihood.kind in CLASSES and alone:
            logs = self._log_probs()
            each = logs.gather(-1, targets.to(logs.device).long().unsqueeze(-1)).squeeze(-1)
            each = each if observed is None else torch.where(observed.to(logs.device), each, 0.0)
            return each.reshape(len(each), -1).sum(-1)

        def density(rows: slice, f: Moments) -> Sequence[Tensor]:
            y = targets[rows].to(f.mean.device)
            seen = None if observed is None else observed[rows].to(f.mean.device)
            return (integrals.log_density(self.likelihood, f, self.output_shape, self._wide(f), y, seen),)

        return self._joined(density(*block) for block in self._functions(self._work))[0]

    def _log_probs(self) -> Tensor:
        return self._probit[0] if self.way == "probit" else self._classes[0]

    @cached
    def _probit(self) -> tuple[Tensor, ...]:
        """Log probabilities, probabilities [N, ..., C] and entropies [N, ...] alone, for which nothing is integrated."""

        def parts(f: Moments) -> Sequence[Tensor]:
            log_p = _probit(self._logits(f))
            return log_p, log_p.exp(), torch.special.entr(log_p.exp()).sum(-1)

        return self._joined(parts(f) for _, f in self._functions(2 * self._size))

    @cached
    def _classes(self) -> tuple[Tensor, ...]:
        """Log probabilities, probabilities, E Var, Var E, each [N, ..., C], entropy and expected entropy, [N, ...]."""
        if self.way == "bridge":
            return self._joined(_dirichlet(_bridge(self._logits(f))) for _, f in self._functions(8 * self._size))
        return self._joined(self._integrated(f) for _, f in self._functions(4 * self._work))

    def _integrated(self, f: Moments) -> Sequence[Tensor]:
        """What `_classes` says, of a block."""
        log_p, weight = self._at_nodes(f)
        p = log_p.exp()
        inside = -(p * log_p).sum(-1)  # the entropy of each node
        if weight is None:
            between, mean = torch.var_mean(p, 0, correction=0)
            expected = inside.mean(0)
        else:
            mean, expected = (weight * p).sum(0), (weight.squeeze(-1) * inside).sum(0)
            between = (weight * (p - mean).square()).sum(0)
        log_mean = mean.log()
        # logarithms of what has underflowed are summed apart, which costs as much again
        if bool((mean < _UNDERFLOW).any()):
            shares = -math.log(len(log_p)) if weight is None else weight.log()
            log_mean = (log_p + shares).logsumexp(0)
        entropy = torch.special.entr(mean).sum(-1)
        if self.way == "probit":
            information, log_mean = (entropy - expected).clamp(min=0), _probit(self._logits(f))
            mean = log_mean.exp()
            entropy = torch.special.entr(mean).sum(-1)
            # information from the integral, total from the approximation: parts that add up and are not negative
            expected = entropy - torch.minimum(information, entropy)
        total = mean * (1 - mean)
        # rounding must not leave a negative aleatoric part
        between = torch.minimum(between, total)
        return log_mean, mean, total - between, between, entropy, expected

    def _binary_last(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of yes/no targets the last class alone, in what has classes."""
        if self.likelihood.kind != "binary":
            return parts
        return [part[..., 1] if part.ndim > len(self.output_shape) + 1 else part for part in parts]

    def _at_nodes(self, f: Moments) -> tuple[Tensor, Tensor | None]:
        """Log P(y = c | f_q) at the nodes of the integral, [Q, n, ..., C], and their weights [Q, 1, …], None where equal."""
        if not isinstance(self.likelihood, likelihoods.Categorical | likelihoods.Bernoulli):  # one of the user's
            points = integrals.scattered(f, self._nodes, self.seed).reshape(-1, len(f.mean), *self.output_shape)
            given: Any = self.likelihood(points, self._wide(f))
            pair = torch.stack([-given.logits, given.logits], -1)
            log_p = F.logsigmoid(pair) if self.likelihood.kind == "binary" else given.logits.log_softmax(-1)
        elif (logits := self._logits(f)).mean.shape[-1] == 2:
            odds, weight = integrals.along(*_difference(logits))
            return F.logsigmoid(torch.stack([-odds, odds], -1)), weight.unsqueeze(-1)
        else:
            shape = logits.mean.shape
            flat = Moments(logits.mean.flatten(0, -2), logits.covariance.flatten(0, len(shape) - 2))  # type: ignore[union-attr]
            log_p = integrals.scattered(flat, self._nodes, self.seed).reshape(-1, *shape).log_softmax(-1)
        return log_p, None

    def _logits(self, f: Moments) -> Moments:
        """Moments of the logits of each target by itself: [n, ..., C] and [n, ..., C, C], or variances [n, ..., C]."""
        covariance = integrals.matrix(f)
        if isinstance(self.likelihood, likelihoods.Bernoulli):  # ±f/2
            mean, variance = (part.reshape(-1, *self.output_shape, 1) for part in (f.mean, f.variance))
            # two classes with logits ±f/2, whose difference is f
            sign = mean.new_tensor([-0.5, 0.5])
            return Moments(mean * sign, variance.unsqueeze(-1) * sign * sign.unsqueeze(-1))
        *places, classes = self.output_shape
        mean = f.mean.reshape(-1, *self.output_shape)
        if covariance is None:
            return Moments(mean, f.variance.reshape(mean.shape))
        count = math.prod(places)
        blocks = covariance.reshape(-1, count, classes, count, classes).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        return Moments(mean, blocks.reshape(*mean.shape, classes))


def _difference(logits: Moments) -> tuple[Tensor, Tensor]:
    """Mean and variance of f_1 − f_0, [n, ...]."""
    variance = logits.variance.sum(-1)
    if logits.covariance is not None and logits.covariance.ndim > logits.mean.ndim:
        variance = variance - logits.covariance[..., 0, 1] - logits.covariance[..., 1, 0]
    return logits.mean[..., 1] - logits.mean[..., 0], variance.clamp(min=0)


def _probit(logits: Moments) -> Tensor:
    """Log softmax(m_c/√(1 + π·v_c/8)), [n, ..., C]; for two classes of their difference."""
    if logits.mean.shape[-1] == 2:
        mean, variance = _difference(logits)
        odds = mean * torch.rsqrt(1 + math.pi / 8 * variance)
        return F.logsigmoid(torch.stack([-odds, odds], -1))
    return (logits.mean * torch.rsqrt(1 + math.pi / 8 * logits.variance.clamp(min=0))).log_softmax(-1)


def _bridge(logits: Moments) -> Tensor:
    """Log α of the Dirichlet, [n, ..., C]: α_c = (1 − 2/C + e^{m_c}·Σ_k e^{−m_k}/C²)/v_c of the logits less their mean."""
    classes = logits.mean.shape[-1]
    mean = logits.mean - logits.mean.mean(-1, keepdim=True)
    variance = logits.variance.clamp(min=0)
    if logits.covariance is not None and logits.covariance.ndim > logits.mean.ndim:
        rows = logits.covariance.mean(-1)
    else:
        rows = variance / classes
    variance = (variance - 2 * rows + rows.mean(-1, keepdim=True)).clamp(min=1e-300)
    # in logarithms: α overflows where the network is sure
    shape = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(classes)
    if classes > 2:
        shape = torch.logaddexp(shape, shape.new_full((), math.log1p(-2 / classes)))
    return shape - variance.log()


def _dirichlet(log_alpha: Tensor) -> Sequence[Tensor]:
    """Of p ~ Dirichlet(α): log E p, E p, E p(1 − p), Var p, H[E p] and E H[p] = ψ(A + 1) − Σ_c E p_c·ψ(α_c + 1), A = Σα."""
    log_total = log_alpha.logsumexp(-1, keepdim=True)
    log_mean = log_alpha - log_total
    mean = log_mean.exp()
    both = mean * (1 - mean)
    between = both / (1 + log_total.exp())
    entropy = torch.special.entr(mean).sum(-1)
    information = (mean * _digamma_gap(log_alpha)).sum(-1) - _digamma_gap(log_total).squeeze(-1)
    expected = entropy - torch.minimum(information.clamp(min=0), entropy)
    return log_mean, mean, both - between, between, entropy, expected


def _digamma_gap(log_a: Tensor) -> Tensor:
    """ψ(a + 1) − log a, which falls to 1/(2a) for large a."""
    a = log_a.exp()
    # both terms grow like log a, and their difference loses its digits
    near = torch.special.digamma(a.clamp(max=1e6) + 1) - log_a
    return torch.where(a < 1e6, near, 0.5 / a)
