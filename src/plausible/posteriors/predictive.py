"""The predictive distribution: the mixture over posterior draws, as a distribution over targets.

p(y | x) = (1/S) Σ_s p(y | f_s(x)), with its uncertainty taken apart by the laws of total variance and of total entropy:

    Var[y]  =  E_s Var[y | f_s]  +  Var_s E[y | f_s]          aleatoric + epistemic
    H[y]    =  E_s H[y | f_s]    +  I[y; s]                   expected entropy + mutual information

Inputs are handled in blocks, so that all draws of all outputs, [S, N, *O], stand in memory only where they are small.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from plausible.core.conversion import as_tensor
from plausible.core.distributions import mixture_cdf, mixture_count_quantile, mixture_quantile
from plausible.core.likelihoods import Likelihood, Scaled
from plausible.core.random import isolated
from plausible.core.special import double, widest
from plausible.core.tables import data_frame
from plausible.core.tasks import Tasks
from plausible.core.turns import cached
from plausible.posteriors import drawing, showing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGET_BYTES = 256 * 1024**2
"""Draws of all outputs that fit into this are computed once and kept."""

BLOCK_BYTES = 64 * 1024**2
"""Inputs are handled in blocks whose draws, with the copies made on the way, fit into this."""

_COPIES = 4  # float64 arrays of the size of the draws that a step holds at once


class Draws(NamedTuple):
    """Draws of the outputs for some inputs, [S, n, *O], and the likelihood's own weights, each with a leading S."""

    outputs: Tensor
    weights: Mapping[str, Tensor]


class _Summary(NamedTuple):
    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None


class Predictive:
    """p(y | x) = (1/S) Σ_s p(y | f_s(x)) for N inputs: an equally weighted mixture, not a Gaussian fitted to it.

    Results have the shape of the targets and lie on the device of the outputs; they are computed in float64 and
    returned in the outputs' type. The summaries (mean, variances, entropies) are computed together in one pass over the inputs and
    kept; every other question takes a pass of its own.

    `source` gives all draws for a slice of the inputs. It is called once where the draws of all outputs, [S, N, *O]
    with S = `num_draws`, N = `num_inputs` and O = `output_shape`, fit into `budget_bytes`, and otherwise for each block
    of each pass, so it must give the same draws each time.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        source: Callable[[slice], Draws],
        *,
        num_inputs: int,
        num_draws: int,
        output_shape: tuple[int, ...],
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1, got {num_draws}")
        self.likelihood = likelihood
        self.num_inputs, self.num_draws, self.output_shape = num_inputs, num_draws, tuple(output_shape)
        self._source, self._budget = source, budget_bytes
        self._whole: Draws | None = None
        self._dtype = torch.get_default_dtype()

    @classmethod
    def from_functions(cls, outputs: Tensor, likelihood: Likelihood, weights: Mapping[str, Tensor] | None = None) -> Predictive:
        """The predictive of given function draws [S, N, *O] and the likelihood's weights, if it has any (leading S)."""
        if not isinstance(outputs, Tensor) or outputs.ndim < 2 or not outputs.is_floating_point():
            got = f"{outputs.dtype} {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(f"outputs must be a floating-point tensor of shape [draws, inputs, ...], got {got}")
        draws, inputs, *shape = outputs.shape
        known = dict(weights or {})
        source = lambda rows: Draws(outputs[:, rows], known)  # noqa: E731
        result = Predictive(likelihood, source, num_inputs=inputs, num_draws=draws, output_shape=tuple(shape))
        result._whole = result._fetch(slice(0, inputs))
        return result

    def __len__(self) -> int:
        return self.num_inputs

    def __repr__(self) -> str:
        sizes = f"inputs={self.num_inputs}, draws={self.num_draws}, outputs={list(self.output_shape)}"
        return f"{type(self).__name__}({self.likelihood}, {sizes})"

    def __getitem__(self, task: str) -> Predictive:
        """The predictive of one of several tasks."""
        tasks = self.likelihood
        if not isinstance(tasks, Tasks) or task not in tasks.likelihoods:
            names = f"its tasks are {', '.join(tasks.likelihoods)}" if isinstance(tasks, Tasks) else "it is of one task alone"
            raise KeyError(f"the predictive has no task {task!r}: {names}")
        shape = tuple(tasks.shapes[task])
        sizes = {"num_inputs": self.num_inputs, "num_draws": self.num_draws, "output_shape": shape}
        return Predictive(tasks.likelihoods[task], lambda rows: Draws(*tasks.part(task, *self._draws(rows))), **sizes)  # type: ignore[arg-type]

    # -----------------------------------------------------------------------------------------------------------------
    # Draws, block by block

    def _fetch(self, rows: slice) -> Draws:
        with torch.no_grad():
            outputs, weights = self._source(rows)
        expected = (self.num_draws, rows.stop - rows.start, *self.output_shape)
        if tuple(outputs.shape) != expected:
            raise ValueError(f"source gave outputs of shape {list(outputs.shape)} for {rows}, expected {list(expected)}")
        for name, weight in weights.items():
            if weight.shape[:1] != (self.num_draws,):
                got = list(weight.shape)
                raise ValueError(f"weight {name!r} needs a leading axis of {self.num_draws} draws, got shape {got}")
        self._dtype = self._returned(outputs)
        return Draws(outputs.detach(), weights)

    def _returned(self, outputs: Tensor) -> torch.dtype:
        """The type of results: that of the outputs, but float64 in other units, whose offset may dwarf the spread."""
        if isinstance(self.likelihood, Scaled):
            return widest(outputs.device)
        return outputs.dtype if outputs.dtype in (torch.float32, torch.float64) else torch.float32

    def _draws(self, rows: slice) -> Draws:
        # float64 is what all questions compute in
        size = 8 * self.num_draws * self.num_inputs * math.prod(self.output_shape)
        if self._whole is None and size <= self._budget:
            self._whole = self._fetch(slice(0, self.num_inputs))
        if self._whole is None:
            return self._fetch(rows)
        return Draws(self._whole.outputs[:, rows], self._whole.weights)

    def _blocks(self, draws: int) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """Slices of the inputs with their outputs and weights in float64; so small that `draws` draws of one fit into a block."""
        each = 8 * _COPIES * draws * math.prod(self.output_shape)
        step = max(1, min(BLOCK_BYTES, self._budget) // max(each, 1))
        for start in range(0, max(self.num_inputs, 1), step):
            rows = slice(start, min(start + step, self.num_inputs))
            outputs, weights = self._draws(rows)
            wide = widest(outputs.device)
            yield rows, outputs.to(wide), {name: weight.to(wide) for name, weight in weights.items()}

    def _collect(
        self, function: Callable[[slice, Tensor, dict[str, Tensor]], Sequence[Tensor]], axis: int = 0, draws: int = 0
    ) -> tuple[Tensor, ...]:
        """Apply a function to each block of draws and join what it returns along the axis of the inputs."""
        return self._joined((function(*block) for block in self._blocks(draws or self.num_draws)), axis)

    def _laws(self, copies: int = 1) -> Iterator[tuple[slice, distributions.Distribution]]:
        """Slices of the inputs with the law of each target on its own, an equally weighted mixture over the leading axis.

        Blocks are so small that `copies` of them fit.
        """
        for rows, outputs, weights in self._blocks(copies * self.num_draws):
            yield rows, self.likelihood(outputs, weights)

    def _first_law(self) -> distributions.Distribution:
        return self.likelihood(*self._draws(slice(0, min(1, self.num_inputs))))

    def _law_of_functions(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation of E[y | f], [N, ...], where its law is a Gaussian; None where it is that of the draws."""
        return None

    def _over_laws(
        self, function: Callable[[slice, Any], Sequence[Tensor]], axis: int = 0, copies: int = 1
    ) -> tuple[Tensor, ...]:
        """Apply a function to each block of `_laws` and join what it returns along the axis of the inputs."""
        return self._joined((function(*block) for block in self._laws(copies)), axis)

    @torch.no_grad()
    def _joined(self, results: Iterator[Sequence[Tensor]], axis: int = 0) -> tuple[Tensor, ...]:
        """All inputs' results from those of blocks: put into place at once, for small pieces would lie between large ones."""
        whole: list[Tensor] = []
        start = 0
        for values in results:
            if not whole:
                shapes = [(*v.shape[:axis], self.num_inputs, *v.shape[axis + 1 :]) for v in values]
                # counts and classes keep their type
                types = [self._dtype if v.is_floating_point() else v.dtype for v in values]
                whole = [v.new_empty(shape, dtype=dtype) for v, shape, dtype in zip(values, shapes, types)]
            count = values[0].shape[axis]
            for v, target in zip(values, whole):
                target.narrow(axis, start, count).copy_(v)
            start += count
        return tuple(whole)

    # -----------------------------------------------------------------------------------------------------------------
    # Summaries: one pass

    @cached
    def _summary(self) -> _Summary:
        kind = self.likelihood.kind

        def moments(rows: slice, outputs: Tensor, weights: dict[str, Tensor]) -> Sequence[Tensor]:  # noqa: ARG001
            distribution: Any = self.likelihood(outputs, weights)
            if kind == "classes":
                p = distribution.logits.exp()
                entropies = [entropy.sum(-1) for entropy in (torch.special.entr(p.mean(0)), torch.special.entr(p).mean(0))]
                return p.mean(0), (p * (1 - p)).mean(0), p.var(0, correction=0), *entropies
            if kind == "binary":
                p, q = torch.sigmoid(distribution.logits), torch.sigmoid(-distribution.logits)
                # 1 − p loses all digits of a small q, so both are computed from the logit
                entropy, expected = _entropy(p.mean(0), q.mean(0)), _entropy(p, q).mean(0)
                return p.mean(0), (p * q).mean(0), p.var(0, correction=0), entropy, expected
            mean = distribution.mean
            return mean.mean(0), distribution.variance.mean(0), mean.var(0, correction=0)

        return _Summary(*self._collect(moments))

    @property
    def mean(self) -> Tensor:
        """E[y], shaped like the targets; for classes the probabilities [N, ..., C]."""
        return self._summary.mean

    @property
    def aleatoric(self) -> Tensor:
        """E_s Var[y | f_s]: the noise that data cannot remove; of the one-hot vector for classes, [N, ..., C]."""
        return self._summary.aleatoric

    @property
    def epistemic(self) -> Tensor:
        """Var_s E[y | f_s]: the disagreement of the draws, that more data would remove; shaped like `mean`."""
        return self._summary.epistemic

    @cached
    def variance(self) -> Tensor:
        """Var[y] = aleatoric + epistemic, shaped like `mean`."""
        return self._summary.aleatoric + self._summary.epistemic

    @cached
    def std(self) -> Tensor:
        """√Var[y], shaped like `mean`."""
        return self.variance.sqrt()

    @property
    def probs(self) -> Tensor:
        """P(y = c) for classes, [N, ..., C]; P(y = 1) for binary targets, [N] or [N, L]."""
        self._need("probs", ("classes", "binary"), "use mean, std, quantile or interval")
        return self.mean

    @property
    def entropy(self) -> Tensor:
        """H[y] in nats, [N]: all uncertainty about the class. For binary targets of each label, [N] or [N, L]."""
        return self._entropies("entropy")[0]

    @property
    def expected_entropy(self) -> Tensor:
        """E_s H[y | f_s] in nats, shaped like `entropy`: the aleatoric part."""
        return self._entropies("expected_entropy")[1]

    @cached
    def mutual_information(self) -> Tensor:
        """I[y; s] = H[y] − E_s H[y | f_s] ≥ 0 in nats, shaped like `entropy`: the epistemic part."""
        total, expected = self._entropies("mutual_information")
        return (total - expected).clamp(min=0)

    def _entropies(self, name: str) -> tuple[Tensor, Tensor]:
        self._need(name, ("classes", "binary"), "use variance, aleatoric and epistemic")
        total, expected = self._summary.entropy, self._summary.expected_entropy
        if total is None or expected is None:
            raise TypeError(f"{self.likelihood} has no entropy")
        return total, expected

    def _need(self, name: str, kinds: tuple[str, ...], advice: str) -> None:
        if self.likelihood.kind not in kinds:
            targets = {"classes": "class", "binary": "binary"}.get(self.likelihood.kind, self.likelihood.kind)
            raise TypeError(f"{name} does not exist for the {targets} targets of {self.likelihood}: {advice}")

    # -----------------------------------------------------------------------------------------------------------------
    # Questions that take a pass each

    @property
    def functions(self) -> Tensor:
        """The draws of f(x), [S, N, *O], all of them in memory; in the units of the targets, as `Posterior.functions`."""
        return self.likelihood.in_units(self.outputs)

    @property
    def outputs(self) -> Tensor:
        """The same as the network gives them, which is what the likelihood takes."""
        if self._whole is not None:
            return self._whole.outputs
        step = max(1, BLOCK_BYTES // max(1, 8 * self.num_draws * math.prod(self.output_shape)))
        starts = range(0, max(self.num_inputs, 1), step)
        return torch.cat([self._draws(slice(s, min(s + step, self.num_inputs))).outputs for s in starts], 1)

    def log_prob(self, y: Any) -> Tensor:
        """The log density log (1/S) Σ_s Π_o p(y_no | f_s(x_n)_o) of each row of targets, [N].

        A draw explains all outputs of an input together: outputs are summed inside a draw, before the mixture.
        """
        y = self.likelihood.packed(y) if isinstance(self.likelihood, Tasks) and isinstance(y, Mapping) else y
        targets = as_tensor(y, "y")
        return self._log_density(self._targets(targets), self.likelihood.observed(targets))

    def log_prob_by_draw(self, y: Any) -> Tensor:
        """The log density Σ_o log p(y_no | f_s(x_n)_o) of each row of targets under each draw on its own, [S, N]."""
        targets = as_tensor(y, "y")
        return self._log_densities(self._targets(targets), self.likelihood.observed(targets), mixed=False)

    def _log_density(self, targets: Tensor, observed: Tensor | None = None) -> Tensor:
        """`log_prob` of checked targets, those alone that were `observed` (a mask shaped like them; None: all)."""
        return self._log_densities(targets, observed, mixed=True)

    def _log_densities(self, targets: Tensor, observed: Tensor | None, mixed: bool) -> Tensor:
        """Log densities of rows: of the mixture, [N], or of each draw, [S, N]."""

        def density(rows: slice, outputs: Tensor, weights: dict[str, Tensor]) -> Sequence[Tensor]:
            each = self.likelihood.log_prob(outputs, targets[rows].to(outputs.device), weights)
            if observed is not None:
                each = torch.where(observed[rows].to(outputs.device), each, 0.0)
            # a draw explains all outputs of an input together: the sum comes before the mixture
            each = each.flatten(2).sum(-1) if each.ndim > 2 else each
            return (each.logsumexp(0) - math.log(self.num_draws) if mixed else each,)

        return self._collect(density, axis=0 if mixed else 1)[0]

    def _log_probs(self) -> Tensor:
        """The log of (1/S) Σ_s p(y = c | f_s), [N, ..., C], without the underflow of the probabilities themselves."""
        binary = self.likelihood.kind == "binary"

        def logs(rows: slice, law: Any) -> Sequence[Tensor]:  # noqa: ARG001
            # in logarithms from the start: probabilities below 1e-308 would be lost
            logits = torch.stack([-law.logits, law.logits], -1) if binary else law.logits
            each = F.logsigmoid(logits) if binary else logits.log_softmax(-1)
            return (each.logsumexp(0) - math.log(len(each)),)

        return self._over_laws(logs)[0]

    def cdf(self, y: Any) -> Tensor:
        """P(y_n ≤ y) of each target on its own, shaped like the targets: (1/S) Σ_s F_s(y)."""
        self._need("cdf", ("continuous", "counts"), "classes have no order; use probs")
        targets = self._targets(y)

        def below(rows: slice, law: Any) -> Sequence[Tensor]:
            return (mixture_cdf(law, targets[rows].to(law.mean)),)

        return self._over_laws(below)[0]

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """F⁻¹(q) of the mixture for each target on its own, to about 1e-12 in F; a leading axis for several q.

        For counts the smallest integer k with F(k) ≥ q.
        """
        self._need("quantile", ("continuous", "counts"), "classes have no order; use probs, entropy or sample")
        try:
            levels = np.asarray(q.cpu() if isinstance(q, Tensor) else q, dtype=float)
        except (TypeError, ValueError):
            levels = np.array(np.nan)
        if levels.ndim > 1 or not levels.size or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"q must be a number or a list of numbers strictly between 0 and 1, got {q!r}")
        # counts have steps, where a root finder would look for a crossing that is not there
        find = mixture_count_quantile if self.likelihood.kind == "counts" else mixture_quantile

        def invert(rows: slice, law: Any) -> Sequence[Tensor]:  # noqa: ARG001
            return (torch.stack([find(law, float(level)) for level in levels.reshape(-1)]),)

        values = self._over_laws(invert, axis=1)[0]
        return values if levels.ndim else values[0]

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The equal-tailed interval of probability `level`: quantiles at (1 − level)/2 and (1 + level)/2."""
        if isinstance(level, bool) or not isinstance(level, numbers.Real) or not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1 (0.9 for a 90 % interval), got {level!r}")
        self._need("interval", ("continuous", "counts"), "classes have no order; use probs, entropy or sample")
        low, high = self.quantile([(1 - level) / 2, (1 + level) / 2])
        return low, high

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """Samples of y, [n, *targets]: each picks one draw f_s for all inputs, so it is coherent, then y ~ p(y | f_s).

        The same seed gives the same samples; PyTorch's global generators are left as they were.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be a positive integer, the number of samples, got {n!r}")
        device = self._draws(slice(0, min(1, self.num_inputs))).outputs.device

        def draw(rows: slice, outputs: Tensor, weights: dict[str, Tensor]) -> Sequence[Tensor]:  # noqa: ARG001
            chosen = {name: weight[picks] for name, weight in weights.items()}
            return (self.likelihood(outputs[picks], chosen).sample(),)

        with isolated(seed, device):
            picks = torch.randint(self.num_draws, (n,)).to(device)  # before the noise, from the same stream
            return self._collect(draw, axis=1, draws=n + self.num_draws)[0]

    # -----------------------------------------------------------------------------------------------------------------
    # To be looked at

    def to_pandas(self, level: float = 0.9, *, names: Sequence[str] | None = None, classes: Sequence[Any] | None = None) -> Any:
        """A data frame with a row for each input; needs pandas.

        Numbers: mean, std, epistemic, aleatoric (variances), lower, upper (the interval of `level`). Classes: prediction,
        p_0, p_1, …, entropy, mutual_information. Several targets have columns y0_mean, y1_mean, …, or as `names` calls them;
        `classes` are the labels, in the order of the outputs, or a list of them for each target.
        """
        return data_frame(showing.columns(self, level, names, classes))

    def plot(self, x: Any = None, y: Any = None, *, output: int = 0, ax: Axes | None = None) -> Axes:
        """Mean, 50 % and 90 % bands (of classes the probabilities, stacked) over one input `x` [N]; needs matplotlib.

        Without x over the rows, sorted by what is predicted of them. `y`: the observed targets of the same rows, as points.
        `output` picks one of several targets, `ax` are axes to draw on, which are returned.
        """
        return drawing.plot(self, x, y, output, ax)

    def _repr_html_(self) -> str:
        return showing.predictive_html(self)

    def first(self, count: int) -> Self:
        """The predictive of the first `count` inputs."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"count must be a whole number of at least 1, got {count!r}")
        result = self._copied()
        result.num_inputs = min(count, self.num_inputs)
        if self._whole is not None:
            result._whole = Draws(self._whole.outputs[:, : result.num_inputs], self._whole.weights)
        return result

    def _copied(self) -> Self:
        """A copy that has answered nothing yet."""
        result = copy(self)
        for name in [n for n in vars(self) if isinstance(getattr(type(self), n, None), cached)]:
            del vars(result)[name]
        return result

    def rescaled(self, loc: float | Sequence[float] | Tensor, scale: float | Sequence[float] | Tensor) -> Self:
        """The predictive of loc + scale·y, for example of standardised targets in their original units; results are float64."""
        result = self._copied()  # draws or moments that are there already serve both; summaries are those of y
        result.likelihood = Scaled(self.likelihood, loc, scale)
        if (held := self._held) is not None:
            result._dtype = result._returned(held)
        return result

    @property
    def _held(self) -> Tensor | None:
        """Outputs that were computed and kept."""
        return None if self._whole is None else self._whole.outputs

    def _targets(self, y: Any) -> Tensor:
        targets = as_tensor(y, "y")
        if self.likelihood.kind == "counts":
            (targets,) = double(targets)  # large counts are not rounded
        return self.likelihood.check((self.num_inputs, *self.output_shape), targets)


def _entropy(p: Tensor, q: Tensor) -> Tensor:
    """−p log p − q log q, with 0 log 0 = 0."""
    return torch.special.entr(p) + torch.special.entr(q)
