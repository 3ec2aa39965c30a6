"""An earlier posterior as the prior of what comes next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plausible.core.priors.composed import as_prior
from plausible.core.priors.rules import LOG_2PI, Prior, total
from plausible.core.transforms import transformed


class Earlier(Prior):
    """log p(w) = −½ (w − μ)ᵀ Λ (w − μ) + ½ log det Λ − ½ d log 2π: the posterior N(μ, Λ⁻¹) of earlier data as the prior.

        first = pl.fit(net, task_1, pl.Laplace(structure="kron"))
        both = pl.fit(net, task_2, pl.Laplace(structure="kron"), prior=pl.priors.Earlier(first), init=first)

    With Kronecker factors that is the online Laplace approximation of Ritter, Botev and Barber (2018), with diagonal ones
    Kirkpatrick et al.'s (2017) elastic weight consolidation with its sums put right (Huszár 2018), and with `MeanField` posteriors
    variational continual learning (Nguyen et al. 2018). `posterior` is one of `Laplace`, which gives Λ as `precision_product(δ)`,
    or independent Gaussians, of which Λ is 1/σ². Weights that were no part of it keep `rest`: by default the prior it was fitted
    with. Unless Λ is diagonal this is one density over all its weights together, and `log_prob` needs all of them, at the cost of
    one product Λδ. It holds tensors, not settings: a file names it, and `load` wants it again.
    """

    def __init__(self, posterior: Any, rest: Prior | Mapping[str, Prior] | None = None):
        # No class is asked for by name: a posterior that is a Gaussian over weights hands its law over itself.
        try:
            law = posterior.as_gaussian()
        except (AttributeError, TypeError):
            raise TypeError(
                "Earlier: posterior must be Gaussian over the weights, as those of Laplace and MeanField are, got "
                f"{posterior!r} of type {type(posterior).__qualname__}"
            ) from None
        if any(bool((scale <= 0).any()) for scale in posterior.scales.values()):
            raise ValueError(
                "Earlier: some weights of the posterior have no spread (they were pruned, or are outside of a subnetwork), so that "
                "it has no density; use the posterior before pruning, or a where= that chooses whole weights"
            )
        before = posterior.model.prior
        before = before.rest if isinstance(before, Earlier) else before  # all else that it says is in the posterior
        self.law: Any = law
        self.rest: Prior = before if rest is None else as_prior(rest)
        self._others = tuple(name for name in posterior.model.initial if name not in law.means)
        self._elsewhere: dict[torch.device, Any] = {next(iter(law.means.values())).device: law}
        self._log_det = 0.0 if law.independent else float(law.precision_log_det)
        self._shown = repr(posterior)
        digest = hashlib.blake2b(digest_size=4)
        for value in law.means.values():
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.__qualname__ = f"Earlier({digest.hexdigest()})"  # what stands for it in files and checkpoints

    def __repr__(self) -> str:
        return f"Earlier({self._shown})"

    def rule(self, name: str) -> Prior:
        return self if name in self.law.means else self.rest.rule(name)

    @property
    def independent(self) -> bool:
        return self.law.independent

    @property
    def proper(self) -> bool:
        return all(self.rest.rule(name).proper for name in self._others)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """−½ δᵀΛδ with its constant for the weights of the earlier posterior, and the log density by `rest` for others."""
        others = {name: weight for name, weight in weights.items() if name not in self.law.means}
        known = {name: weight for name, weight in weights.items() if name not in others}
        parts = [self.rest.log_prob(others)] if others else []
        if not known or self.independent:
            return total([*parts, *(self.elementwise(name, weight).sum() for name, weight in known.items())])
        earlier = self.there(known)
        if missing := [name for name in earlier.means if name not in known]:
            raise ValueError(
                f"Earlier is one density over {len(earlier.means)} weights together, and {missing[0]!r} is not among those given "
                f"({', '.join(known)}): make all of them random again, or fit the first posterior with structure='diag'"
            )
        moved = {name: known[name] - mean.to(known[name].dtype) for name, mean in earlier.means.items()}
        names = tuple(moved)
        product = lambda *values: tuple(map(earlier.precision_product(dict(zip(names, values))).__getitem__, names))  # noqa: E731
        # a custom function has no rule under transforms, and is not needed without gradients
        plain = transformed() or not torch.is_grad_enabled()
        if plain:
            square = total((one * two).sum() for one, two in zip(moved.values(), product(*moved.values())))
        else:
            square = _Square.apply(product, *moved.values())
        count = sum(value.numel() for value in moved.values())
        return total([*parts, -0.5 * square + 0.5 * (self._log_det - count * LOG_2PI)])

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        if name not in self.law.means:
            return self.rest.elementwise(name, weight)
        if not self.independent:
            raise ValueError(f"Earlier is one density over all weights of {self._shown}: {name!r} alone has none")
        earlier = self.there({name: weight})
        mean, scale = earlier.means[name].to(weight.dtype), earlier.scales[name].to(weight.dtype)
        return -0.5 * ((weight - mean) / scale).square() - scale.log() - 0.5 * LOG_2PI

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:
        """E log p(w) under w ~ N(mean, scale²), where elements are independent: −½ (((μ' − μ)² + σ'²)/σ² + log 2πσ²)."""
        if name not in self.law.means:
            return self.rest.expectation(name, mean, scale)
        if not self.independent:
            return None
        variance = self.there({name: mean}).scales[name].to(mean.dtype).square()
        return (self.elementwise(name, mean) - 0.5 * scale.square() / variance).sum()

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        if name not in self.law.means:
            return self.rest.draw(name, like, generator, draws)
        drawn = self._drawn(generator, math.prod(draws))[name]
        return drawn.reshape(*draws, *like.shape).to(generator.device)

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        others = {name: weight for name, weight in like.items() if name not in self.law.means}
        apart = self.rest.sample(others, generator, draws)
        together = self._drawn(generator, 1 if draws is None else draws)
        if draws is None:
            together = {name: value[0] for name, value in together.items()}
        return {name: apart[name] if name in apart else together[name].to(weight) for name, weight in like.items()}

    def _drawn(self, generator: torch.Generator, count: int) -> Mapping[str, Tensor]:
        # the law draws by seeds: one of them comes from the generator
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        return self.law.draws(0, count, seed)

    def there(self, weights: Mapping[str, Tensor]) -> Any:
        """The law of the earlier posterior, on the device of these weights; their shapes must be its own."""
        for name, weight in weights.items():
            if name in self.law.means and weight.shape != self.law.means[name].shape:
                raise ValueError(
                    f"prior does not fit this network: {name!r} has shape {tuple(weight.shape)}, and shape "
                    f"{tuple(self.law.means[name].shape)} in the earlier posterior"
                )
        device = next(iter(weights.values())).device
        if device not in self._elsewhere:
            # moved once: factors may be large
            self._elsewhere[device] = self.law.to(device)
        return self._elsewhere[device]


class _Square(torch.autograd.Function):
    """δᵀΛδ, whose gradient 2Λδ is known when the value is."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., tuple[Tensor, ...]], *moved: Tensor) -> Tensor:
        turned = product(*moved)
        ctx.product = product
        ctx.save_for_backward(*moved, *turned)
        return total((one * two).sum() for one, two in zip(moved, turned))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        half = len(ctx.saved_tensors) // 2
        moved, turned = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        if torch.is_grad_enabled():  # for second derivatives
            turned = ctx.product(*moved)
        return None, *(2 * grad * value for value in turned)


def earlier_posterior(prior: Prior, names: Sequence[str], weights: Mapping[str, Tensor]) -> Any:
    """The law that is the prior of these weights together, on their device; None where each weight has its own prior."""
    rule = prior.rule(names[0])
    if not isinstance(rule, Earlier) or rule.independent:
        return None
    law = rule.there({name: weights[name] for name in names})
    if set(law.means) != set(names):
        raise ValueError(
            f"prior is a posterior of {', '.join(law.means)}, and this one is to be of {', '.join(names)}: use the same "
            "where= for all tasks"
        )
    return law
