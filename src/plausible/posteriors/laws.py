"""Posteriors that are a law over the weights, drawn anew whenever they are asked.

`LawPosterior` is one class for all of them; a `Law` is what differs: independent Gaussians, variational families with their
parameters, and around a mode the Gaussian of `linearised.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from plausible.blocks.families import Family
from plausible.blocks.variational import entropy, expected_log_prior
from plausible.core import random
from plausible.core import weights as tree
from plausible.core.draws import outputs_of_draws
from plausible.core.model import Model
from plausible.core.priors import LogUniform, Prior
from plausible.core.serialise import Opaque
from plausible.core.turns import cached
from plausible.core.weights import Weights
from plausible.engine.method import Fitted
from plausible.posteriors.base import Posterior, check_draws, record_of
from plausible.posteriors.draws import try_network
from plausible.posteriors.predictive import Draws
from plausible.posteriors.pruning import unpruned, zeroed
from plausible.posteriors.saving import Content

DRAWS = 100
"""Draws that are taken where none are asked for."""
BLOCK = 10
"""Draws whose noise comes out of one generator on a GPU, where one generator for each would cost more than the noise."""
MOMENT_DRAWS = 1000
"""Draws for means and scales that have no closed form."""

NARROW = 1e-150
"""The scale of a weight that is a point, in float64."""

laws: dict[str, type[Law]] = {}
"""The word for a law in files → its class."""


class Law(ABC):
    """q(w) over named weights. Draw number s is a function of the seed and s, so that more draws begin with the same ones.

    A subclass has a `kind`, the word for it in files; its `means` and `scales`, by name; `tensors`, groups of all that it consists
    of, with plain `settings` where there are any; and says `noise` (a vector of the length, type and device of what a draw takes),
    `sample`, `log_density`, `kl` and `rebuilt`. A Gaussian says whether elements are `independent`; one whose are not has
    `precision_product` and `precision_log_det`. With `to(device)` it can then be the prior of what comes next (`priors.Earlier`).
    """

    kind: ClassVar[str] = ""
    independent: bool | None = None
    kl_of_pruned: ClassVar[bool] = True
    has_density: ClassVar[bool] = True
    settings: Mapping[str, Any] = {}
    means: Weights
    scales: Weights

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if cls.__dict__.get("kind"):
            laws[cls.kind] = cls

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Weights]:
        """Groups of named tensors."""

    @classmethod
    @abstractmethod
    def rebuilt(cls, method: Any, model: Model, content: Content) -> Self:
        """The inverse of `tensors` and `settings`."""

    @property
    @abstractmethod
    def noise(self) -> Tensor:
        """Any vector of the length, type and device of what one draw takes."""

    @abstractmethod
    def sample(self, noise: Tensor, first: int) -> Weights:
        """The draws number first … that this standard normal noise [count, size] gives, stacked."""

    @abstractmethod
    def log_density(self, weights: Weights) -> Tensor:
        """Log q(w) of one set of weights: 0-d."""

    @abstractmethod
    def kl(self, prior: Prior, masks: Weights, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) in nats of the weights that `masks` keep; where there is no closed form over `samples` draws."""

    def status(self, name: str) -> str:  # noqa: ARG002
        return "inferred"

    @property
    def block(self) -> int:
        """How many draws share a generator."""
        return 1 if self.noise.device.type == "cpu" else BLOCK

    @torch.no_grad()
    def draws(self, first: int, count: int, seed: int, purpose: int = 9) -> Weights:
        """Draws number first … first + count − 1, stacked."""
        like, block = self.noise, self.block
        size = len(like)
        # whole blocks are drawn, also where part of one is asked for: draw s is the same in whatever company
        numbers = range(first // block, -(-(first + count) // block))
        drawn = [random.normals(seed, purpose, k, count=block * size, like=like) for k in numbers]
        whole = (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).view(-1, size)
        start = first - numbers[0] * block
        return self.sample(whole[start : start + count], first)


class DiagonalGaussian(Law):
    """q(w) = Π N(w_i; μ_i, σ_i²); `ways` says by which noise each weight was trained, for the summary."""

    kind = "gaussian"
    independent = True

    def __init__(self, means: Weights, scales: Weights, ways: Mapping[str, str] | None = None):
        self.means, self.scales, self.settings = means, scales, {"ways": dict(ways or {})}

    @classmethod
    def of(cls, model: Model, fitted: Fitted, scales: Weights, ways: Mapping[str, str] | None = None) -> Self:
        """Around the last weights of a run."""
        return cls(tree.clone(tree.select(fitted.state.weights, model.random)), tree.clone(scales), ways)

    @property
    def tensors(self) -> dict[str, Weights]:
        return {"mean": self.means, "scale": self.scales}

    @classmethod
    def rebuilt(cls, method: Any, model: Model, content: Content) -> Self:  # noqa: ARG003
        like = tree.select(model.initial, model.random)
        ways = {str(name): str(way) for name, way in content.settings["ways"].items()}
        return cls(content.group("mean", like), content.group("scale", like), ways)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(tree.to(self.means, device), tree.to(self.scales, device), self.settings["ways"])

    @cached
    def noise(self) -> Tensor:
        # noise in the widest type, rounded for narrower weights
        widest = max(self.means.values(), key=lambda mean: torch.finfo(mean.dtype).bits)
        return widest.new_empty(1).expand(tree.num_elements(self.means))

    def sample(self, noise: Tensor, first: int) -> Weights:  # noqa: ARG002
        parts = noise.split_with_sizes([mean.numel() for mean in self.means.values()], dim=1)
        return {
            name: torch.addcmul(mean, self.scales[name], part.view(len(part), *mean.shape).to(mean.dtype))
            for (name, mean), part in zip(self.means.items(), parts)
        }

    def log_density(self, weights: Weights) -> Tensor:
        each = [torch.distributions.Normal(m, self.scales[n]).log_prob(weights[n]).sum() for n, m in self.means.items()]
        return torch.stack(each).sum()

    def kl(self, prior: Prior, masks: Weights, samples: int = 1000, seed: int = 0) -> float:
        """Exact where the prior has a closed form, else over `samples` draws of the rest.

        Pruned weights are points at 0, whose divergence from a density is infinite: they are left out.
        """
        wide = {name: mean.double() for name, mean in zeroed(self.means, masks).items()}
        scales = {name: scale.double() for name, scale in self.scales.items()}
        # a scale that is nearly 0 for a point, whose contribution is then taken out again
        narrow = {n: torch.where(masks[n], s, NARROW) if n in masks else s for n, s in scales.items()}
        closed, rest = expected_log_prior(prior, wide, narrow)
        for name in (name for name in masks if name not in rest):  # what the points at 0 added
            closed = closed - _at_zero(prior, name, wide[name], masks[name])
        value = -entropy(unpruned(scales, masks)) - closed
        if rest:
            stream = random.generator(seed, 11)
            parts = []
            for _ in range(samples):
                normal = {n: torch.randn(wide[n].shape, generator=stream, dtype=torch.float64).to(wide[n]) for n in rest}
                drawn = {n: wide[n] + scales[n] * noise for n, noise in normal.items()}
                if masks:
                    densities = unpruned({n: prior.elementwise(n, w) for n, w in drawn.items()}, masks)
                    parts.append(torch.stack([d.sum() for d in densities.values()]).sum())
                else:
                    parts.append(prior.log_prob(drawn))
            value = value - torch.stack(parts).mean()
        return float(value)

    def status(self, name: str) -> str:
        way = self.settings["ways"].get(name)
        return "inferred" if way is None else f"inferred, noise by {way}"


def _at_zero(prior: Prior, name: str, like: Tensor, mask: Tensor) -> Tensor:
    """What `expectation` gives for the elements of a weight that are narrow around 0, those that `mask` leaves out."""
    zeros = torch.zeros_like(like)
    if not isinstance(prior.rule(name), LogUniform):
        return prior.elementwise(name, zeros)[~mask].sum()
    # log p has a pole there: narrow is not 0, and all elements are alike
    every = prior.expectation(name, zeros, torch.full_like(zeros, NARROW))
    assert every is not None
    return every * ((~mask).sum() / mask.numel())


class FamilyLaw(Law):
    """q(w; θ) of a variational family: `parameters` θ by name. `make` is the family of given weights, `like` the random ones.

    Of a mixture of K components draw s belongs to component s mod K.
    """

    kind = "family"
    kl_of_pruned = False

    def __init__(self, make: Callable[[Weights], Family], like: Weights, parameters: Weights):
        self.make, self.parameters = make, parameters
        self.family = make(like)

    @property
    def tensors(self) -> dict[str, Weights]:
        return {"parameter": self.parameters}

    @classmethod
    def rebuilt(cls, method: Any, model: Model, content: Content) -> Self:
        if isinstance(method, Opaque):
            raise ValueError(
                f"this posterior was fitted by {method.name}, which is your own code: its family cannot be made again; decorate "
                "the class with @plausible.core.serialise.register and import it before loading"
            )
        like = tree.select(model.initial, model.random)
        # a family started anew says which parameters a file must hold, and their shapes
        start = tree.to(like, "cpu")
        return cls(method.family, like, content.group("parameter", method.family(start).start(start, 1.0, random.key(0))))

    @cached
    def _noises(self) -> Weights:
        return self.family.noise(self.parameters)

    @cached
    def noise(self) -> Tensor:
        return next(iter(self._noises.values())).new_empty(1).expand(tree.num_elements(self._noises))

    def sample(self, noise: Tensor, first: int) -> Weights:
        return tree.stack([self._drawn(self.family, self.parameters, row, first + k).weights for k, row in enumerate(noise)])

    def _drawn(self, family: Family, parameters: Weights, flat: Tensor, number: int) -> Any:
        like = self._noises if family is self.family else family.noise(parameters)
        noise = {name: part.to(like[name].dtype) for name, part in tree.unflatten(flat, like).items()}
        return family.draw(parameters, noise, number % family.components)

    def log_density(self, weights: Weights) -> Tensor:
        return self.family.log_density(self.parameters, weights)

    @property
    def means(self) -> Weights:  # type: ignore[override]
        return self._moments[0]

    @property
    def scales(self) -> Weights:  # type: ignore[override]
        return self._moments[1]

    @cached
    @torch.no_grad()
    def _moments(self) -> tuple[Weights, Weights]:
        """In closed form, or over 1,000 draws where the family has none."""
        means, scales = self.family.means(self.parameters), self.family.scales(self.parameters)
        if means is not None and scales is not None:
            return means, scales
        totals = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.family.like.items()}
        for number in range(MOMENT_DRAWS):  # one at a time: a thousand draws need not fit into memory
            drawn = self.draws(number, 1, 0, purpose=12)
            for name, (mean, square) in totals.items():  # Welford's recursion
                gap = drawn[name][0] - mean
                mean += gap / (number + 1)
                square += gap * (drawn[name][0] - mean)
        spread = {name: (square / (MOMENT_DRAWS - 1)).sqrt() for name, (_, square) in totals.items()}
        return {name: mean for name, (mean, _) in totals.items()}, spread

    @torch.no_grad()
    def kl(self, prior: Prior, masks: Weights, samples: int = 1000, seed: int = 0) -> float:
        """Exact where there is a closed form, the rest over `samples` draws.

        Not known of a pruned posterior: what is left of q is a marginal that families need not have in closed form.
        """
        if masks:
            raise ValueError("kl is not known of a pruned posterior; ask for that of the posterior before prune(…)")
        family = self.make({name: w.double() for name, w in self.family.like.items()})
        parameters = {name: value.double() for name, value in self.parameters.items()}
        closed = family.closed(prior, parameters)
        if not (closed.density or closed.names):
            return float(closed.value)
        total = torch.zeros_like(closed.value)
        like = next(iter(family.noise(parameters).values()))
        for number in range(samples):
            flat = random.normals(seed, 11, number, count=len(self.noise), like=like)
            total += family.sampled(prior, parameters, self._drawn(family, parameters, flat, number), closed)
        return float(closed.value + total / samples)

    def status(self, name: str) -> str:
        return self.family.status(name)


class LawPosterior(Posterior):
    """A `law` over the random weights; `points` are weights and buffers that have no distribution.

    `means` and `scales` of the weights, by name, give signal-to-noise ratios and pruning.
    """

    kind = "law"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], law: Law, points: Weights):
        super().__init__(method, model, run)
        self.law, self.points = law, points

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, law: Law) -> Self:
        """From what a run left; the bound of its last epoch is the estimate of log p(D)."""
        points = tree.clone({**tree.select(fitted.state.weights, model.points), **fitted.state.buffers})
        posterior = cls(method, model, record_of(fitted), law, points)
        bound = fitted.history.get("elbo")
        posterior.log_evidence = bound[-1] if bound else None
        return posterior

    def content(self) -> Content:
        return Content({**self.law.tensors, "point": self.points}, {"law": self.law.kind, **self.law.settings})

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        law = laws[content.settings["law"]].rebuilt(method, model, content)
        fixed = {**tree.select(model.initial, model.points), **model.buffers}
        return cls(method, model, run, law, content.group("point", fixed))

    @property
    def means(self) -> Weights:
        return self.kept(self.law.means)

    @property
    def scales(self) -> Weights:
        return self.kept(self.law.scales)

    @property
    def family(self) -> Any:
        """Of variational families: the `Family` over the random weights, of the kind that the method has."""
        return self.law.family  # type: ignore[attr-defined]

    @property
    def parameters(self) -> Weights:
        """Of variational families: θ, by name."""
        return self.law.parameters  # type: ignore[attr-defined]

    def num_draws(self, draws: int | None) -> int:
        return DRAWS if draws is None else draws

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        source = lambda first, count: self.kept(self.law.draws(first, count, seed))  # noqa: E731
        options: Any = {"fixed": self.points, "batch_size": batch_size, "block": self.law.block}
        return Draws(*outputs_of_draws(self.model, source, self.num_draws(draws), inputs, **options))

    def try_inputs(self, inputs: Any) -> tuple[int, ...]:
        return try_network(self, inputs)

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        drawn = self.law.draws(0, self.num_draws(check_draws(draws)), seed)
        return tree.select(self.kept(drawn), self.model.random)

    def starting_points(self, members: int) -> Weights:
        """The means for one run, draws for several; with the weights and buffers that have no distribution."""
        drawn = self.weights(members) if members > 1 else {name: mean[None] for name, mean in self.means.items()}
        return drawn | {name: value.expand(members, *value.shape) for name, value in self.points.items()}

    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats; where there is no closed form over `samples` draws."""
        return self.law.kl(self.model.prior, self._masks, samples, seed)

    def snr(self, decibels: bool = False) -> Weights:
        """|μ|/σ of each weight, by name; in decibels 20·log₁₀(|μ|/σ). That of a pruned weight is 0, or −∞ decibels."""
        scales = self.scales
        ratios = {n: torch.where(mean == 0, 0.0, mean.abs() / scales[n]) for n, mean in self.means.items()}
        return {name: 20 * ratio.log10() for name, ratio in ratios.items()} if decibels else ratios

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """`kl` in nats (None where it is not known), and the quartiles of the signal-to-noise ratios.

        Those are of the weights that have a scale and were not pruned. Draws are independent, so there are no chains to judge.
        """
        ratios = torch.cat([ratio.flatten() for ratio in unpruned(self.snr(), self._masks).values()]).double().cpu()
        # weights outside of a subnetwork have no scale
        ratios = ratios[ratios.isfinite()]
        quartiles = torch.full((3,), torch.nan)
        if len(ratios):  # torch.quantile takes no more than 16 million numbers, and a hundred thousand are enough
            # evenly thinned, so that every layer is among them
            thinned = ratios[:: -(-len(ratios) // 100_000)]
            quartiles = torch.quantile(thinned, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        known = self.law.has_density and (self.law.kl_of_pruned or not self._masks)
        divergence = self.kl(samples=100) if known else None
        return super().diagnostics(x) | {"kl": divergence, "snr_quartiles": quartiles.tolist()}

    def networks(self) -> list[tuple[Weights, Weights | None]]:
        return [(self.means, self.scales)]

    def as_gaussian(self) -> Law:
        """The law, where it is a Gaussian that can be the prior of what comes next (`priors.Earlier`)."""
        if self.law.independent is None:
            raise TypeError(f"{self!r} is not Gaussian over the weights")
        return self.law

    def status(self, name: str) -> str:
        return self.law.status(name) if name in self.model.random else super().status(name)
