"""What a variational family is: parameters, draws, and KL(q ‖ p) in closed form as far as that goes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.variational import inverse_softplus
from plausible.core.priors import FanIn, Flat, Gaussian, Prior
from plausible.core.weights import Weights, flatten, select, unflatten

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Drawn(NamedTuple):
    """One draw: the random weights by name, and log q(w) (0-d, differentiable in θ) where drawing computes it anyway.

    In place of log q(w) may stand any number whose mean over draws is at least E_q log q(w), such as log q(w, z) − log r(z | w)
    of an auxiliary model r: the bound stays a bound.
    """

    weights: Weights
    log_density: Tensor | None = None


class Closed(NamedTuple):
    """The part of KL(q ‖ p) in closed form (0-d, nats); whether log q, and for which weights log p, remain to be sampled."""

    value: Tensor
    density: bool
    names: tuple[str, ...]


class Family(ABC):
    """q(w; θ): made from the random weights of a model (`like`: names, shapes, types), it has no tensors of its own.

    A subclass gives `start`, `noise` and `draw`, then what it has of

    - `entropy(θ)`, exact; or a `log_density` in what `draw` returns; or `log_density(θ, weights)`, which also allows
      `landing=True`. One of them is needed;
    - `means(θ)` and `scales(θ)`, marginal, and `gaussian = True` where the marginals are Gaussian: expectations of log p are then
      in closed form (for Gaussian and flat priors any marginals will do).

    All of it is called with plain dicts of tensors, eagerly and under `vmap`, `torch.func.grad` and `torch.compile`: no
    `.item()`, no branch on values, no random numbers but `noise`. `components` above 1 is an equal mixture: each step draws
    from every component and averages; draw number s of a posterior belongs to component s mod `components`.
    """

    components: int = 1
    gaussian: ClassVar[bool] = False

    def __init__(self, like: Mapping[str, Tensor]):
        self.like = dict(like)

    # -----------------------------------------------------------------------------------------------------------------
    # What a family says
    @abstractmethod
    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        """θ at which q is centred at `weights` with marginal scales of about `scale`; `key` is for random starts."""

    @abstractmethod
    def noise(self, parameters: Weights) -> Weights:
        """Tensors of the shapes of the standard normal noise that one draw needs; their values do not matter."""

    @abstractmethod
    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:
        """The weights that this noise gives, differentiable in the parameters."""

    def mirrored(self, noise: Weights) -> Weights:
        return {name: -value for name, value in noise.items()}

    def entropy(self, parameters: Weights) -> Tensor | None:  # noqa: ARG002
        """H(q) in nats, exact: 0-d; None where there is no closed form."""
        return None

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        """Log q(w; θ): 0-d."""
        raise NotImplementedError(f"{type(self).__name__} has no density at given weights")

    def landing(self, parameters: Weights, drawn: Drawn, noise: Weights) -> Tensor:  # noqa: ARG002
        """Log q(w; θ) with θ held fixed, so that the gradient flows through w alone; `noise` is what w was drawn with."""
        return self.log_density({name: value.detach() for name, value in parameters.items()}, drawn.weights)

    def means(self, parameters: Weights) -> Weights | None:  # noqa: ARG002
        """Marginal means by name, or None."""
        return None

    def scales(self, parameters: Weights) -> Weights | None:  # noqa: ARG002
        """Marginal standard deviations by name, or None."""
        return None

    def log_prior_of_points(self, prior: Prior, parameters: Weights) -> Tensor | None:  # noqa: ARG002
        """Log p of weights that this family trains as points; None where there are none."""
        return None

    def status(self, name: str) -> str:  # noqa: ARG002
        return "inferred"

    # -----------------------------------------------------------------------------------------------------------------
    # What follows from it
    @property
    def has_density(self) -> bool:
        return type(self).log_density is not Family.log_density

    def closed(self, prior: Prior, parameters: Weights, temperature: float = 1.0) -> Closed:
        """−H(q) − E_q log p(w)/T as far as it has a closed form, and what is left to draws."""
        entropy = self.entropy(parameters)
        value = _zero(parameters) if entropy is None else -entropy
        means = self.means(parameters)
        scales = None if means is None else self.scales(parameters)
        if means is None or scales is None:
            return Closed(value, entropy is None, tuple(self.like))
        names = []
        for name, mean in means.items():
            # other marginals have other expectations of log p
            usable = self.gaussian or second_moments_suffice(prior, name)
            term = prior.expectation(name, mean, scales[name]) if usable else None
            if term is None:
                names.append(name)
            else:
                value = value - term / temperature
        return Closed(value, entropy is None, tuple(names))

    def open(self, parameters: Weights) -> Closed:
        """The same with nothing in closed form: log q and log p of the same draws, whose noise cancels where q is close to p."""
        return Closed(_zero(parameters), True, tuple(self.like))

    def sampled(
        self,
        prior: Prior,
        parameters: Weights,
        drawn: Drawn,
        part: Closed,
        temperature: float = 1.0,
        landing: Weights | None = None,
    ) -> Tensor:
        """What one draw adds to `part.value`: log q(w) − log p(w)/T of what it left open.

        `landing`, the noise of the draw, holds θ fixed inside log q.
        """
        value = torch.zeros_like(part.value)
        if part.density:
            if landing is not None:
                value = self.landing(parameters, drawn, landing)
            else:
                given = drawn.log_density
                value = self.log_density(parameters, drawn.weights) if given is None else given
        if part.names:
            value = value - prior.log_prob(select(drawn.weights, part.names)) / temperature
        return value


class FlatFamily(Family):
    """A family over one vector [P]: all random weights, flattened in their order."""

    def __init__(self, like: Mapping[str, Tensor]):
        super().__init__(like)
        self.size = sum(weight.numel() for weight in self.like.values())

    def named(self, vector: Tensor) -> Weights:
        return {name: part.to(self.like[name].dtype) for name, part in unflatten(vector, self.like).items()}

    def vector(self, weights: Weights) -> Tensor:
        return flatten(select(weights, self.like))

    def status(self, name: str) -> str:  # noqa: ARG002
        return "inferred, jointly with all others"


def second_moments_suffice(prior: Prior, name: str) -> bool:
    """Whether E log p(w) depends on w by mean and variance alone: Gaussian and flat priors, also with fan-in."""
    rule = prior.rule(name)
    while isinstance(rule, FanIn):
        # fan-in only scales
        rule = rule.prior.rule(name)
    return isinstance(rule, Gaussian | Flat)


def standard_log_density(noise: Tensor) -> Tensor:
    """Log N(noise; 0, I), summed: 0-d."""
    return -0.5 * noise.square().sum() - HALF_LOG_2PI * noise.numel()


def sloping(value: Tensor, slopes: Weights, weights: Weights) -> Tensor:
    """The given value, with these gradients with respect to the weights."""
    # a linear function with the right gradient, less its own value
    plane = torch.stack([(slopes[name].detach() * weights[name]).sum() for name in slopes]).sum()
    return value.detach() + (plane - plane.detach())


def positive_lower(raw: Tensor) -> Tensor:
    """L = diag(d)(I + T/√n), d the softplus of the diagonal of `raw` [n, n] and T its part below: any Cholesky factor.

    An optimiser with steps of one size moves all n(n − 1)/2 entries of T at once. In these units what noise adds to them
    changes the scales by a factor near 1; as plain entries of L they would soon outweigh the diagonal.
    """
    diagonal = F.softplus(raw.diagonal())
    return torch.diag(diagonal) + diagonal[:, None] * raw.tril(-1) * len(raw) ** -0.5


def raw_lower(factor: Tensor) -> Tensor:
    """The matrix from which `positive_lower` makes this Cholesky factor [n, n]."""
    diagonal = factor.diagonal()
    return torch.diag(inverse_softplus(diagonal)) + factor.tril(-1) / diagonal[:, None] * len(factor) ** 0.5


def _zero(parameters: Weights) -> Tensor:
    return next(iter(parameters.values())).new_zeros(())
