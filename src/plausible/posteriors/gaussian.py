"""Posteriors that are independent Gaussians over the weights: drawn anew whenever they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from plausible.blocks.variational import entropy, expected_log_prior
from plausible.core import random, storage
from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.posteriors.base import record_of
from plausible.posteriors.fresh import FreshDraws

if TYPE_CHECKING:
    from plausible.engine import Fitted


class GaussianPosterior(FreshDraws):
    """q(w) = Π N(w_i; μ_i, σ_i²): `means` and `scales` by name; `points` are weights and buffers that have no distribution.

    Draw s is a function of the seed and s, so that more draws begin with the same ones.
    """

    kind = "gaussian"

    def __init__(
        self,
        method: Any,
        model: Model,
        run: Mapping[str, Any],
        means: Weights,
        scales: Weights,
        points: Weights,
        ways: Mapping[str, str] | None = None,
    ):
        super().__init__(method, model, run)
        self.means, self.scales, self.points = means, scales, points
        self.ways = dict(ways or {})
        self.log_evidence = None

    @classmethod
    def of(
        cls, method: Any, model: Model, fitted: Fitted, scales: Weights, ways: Mapping[str, str] | None = None
    ) -> GaussianPosterior:
        """From what a run left; the bound of its last epoch is the estimate of log p(D)."""
        state = fitted.state
        means = {name: state.weights[name].detach().clone() for name in model.random}
        points = {name: state.weights[name].detach().clone() for name in model.points}
        points |= {name: value.detach().clone() for name, value in state.buffers.items()}
        posterior = cls(method, model, record_of(fitted), means, tree.clone(scales), points, ways)
        bound = fitted.history.get("elbo")
        posterior.log_evidence = bound[-1] if bound else None
        return posterior

    # -----------------------------------------------------------------------------------------------------------------
    # Draws

    def _sampled(self, first: int, count: int, seed: int) -> Weights:
        """Draws number first … first+count−1, stacked, with the points beside them."""
        sizes = [mean.numel() for mean in self.means.values()]
        widest = max(self.means.values(), key=lambda mean: torch.finfo(mean.dtype).bits)
        noise = self._noise(first, count, seed, sum(sizes), widest)
        drawn = {}
        for (name, mean), part in zip(self.means.items(), noise.split_with_sizes(sizes, dim=1)):
            drawn[name] = torch.addcmul(mean, self.scales[name], part.view(count, *mean.shape).to(mean.dtype))
        return drawn | {name: value.expand(count, *value.shape) for name, value in self.points.items()}

    # -----------------------------------------------------------------------------------------------------------------
    # About q

    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats: exact where the prior has a closed form, else over `samples` draws of the rest.

        Pruned weights are points at 0, whose divergence from a density is infinite: they are left out.
        """
        prior, masks = self.model.prior, self._masks
        wide = {name: mean.double() for name, mean in self.means.items()}
        scales = {name: scale.double() for name, scale in self.scales.items()}
        narrow = {n: torch.where(masks[n], s, 1e-150) if n in masks else s for n, s in scales.items()}
        closed, rest = expected_log_prior(prior, wide, narrow)
        for name in (name for name in masks if name not in rest):  # what the points at 0 added
            closed = closed - prior.elementwise(name, torch.zeros_like(wide[name]))[~masks[name]].sum()
        value = -entropy(self._left(scales)) - closed
        if rest:
            stream = random.generator(seed, 11)
            parts = []
            for _ in range(samples):
                drawn = {
                    n: wide[n] + scales[n] * torch.randn(wide[n].shape, generator=stream, dtype=torch.float64).to(wide[n])
                    for n in rest
                }
                if masks:
                    densities = {n: prior.elementwise(n, w) for n, w in drawn.items()}
                    parts.append(torch.stack([d.sum() for d in self._left(densities).values()]).sum())
                else:
                    parts.append(prior.log_prob(drawn))
            value = value - torch.stack(parts).mean()
        return float(value)

    def _masked(self, masks: Weights) -> Self:
        """With μ = σ = 0 where a weight was pruned."""
        pruned = super()._masked(masks)
        pruned.means, pruned.scales = pruned._kept(self.means), pruned._kept(self.scales)
        return pruned

    def _status(self, name: str) -> str:
        if name in self.means:
            way = self.ways.get(name)
            return "inferred" if way is None else f"inferred, noise by {way}"
        return super()._status(name)

    # -----------------------------------------------------------------------------------------------------------------

    def _moved(self, model: Model, device: torch.device) -> GaussianPosterior:
        means, scales, points = (tree.to(part, device) for part in (self.means, self.scales, self.points))
        run = {**self.run, "history": self.history}
        return GaussianPosterior(self.method, model, run, means, scales, points, self.ways)

    def _write(self, folder: Path) -> dict[str, Any]:
        parts = {"mean": self.means, "scale": self.scales, "point": self.points}
        named = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        return {"gaussian_sha256": storage.write_tensors(folder / "gaussian.safetensors", named), "ways": self.ways}

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> GaussianPosterior:
        from plausible.posteriors.saving import history_of

        path = folder / "gaussian.safetensors"
        found = storage.read_tensors(path, content["gaussian_sha256"])
        device = next(iter(model.initial.values())).device
        parts: dict[str, Weights] = {"mean": {}, "scale": {}, "point": {}}
        for key, value in found.items():
            part, _, name = key.partition(".")
            parts[part][name] = value.to(device)
        for part, names in (("mean", model.random), ("scale", model.random), ("point", (*model.points, *model.buffers))):
            expected = {**model.initial, **model.buffers}
            for name in names:
                if name not in parts[part] or parts[part][name].shape != expected[name].shape:
                    raise ValueError(f"{path} does not fit posterior.json: {part} of {name!r} is missing or has another shape")
        ordered = {
            part: {n: values[n] for n in names if n in values}
            for part, values, names in (
                ("mean", parts["mean"], model.random),
                ("scale", parts["scale"], model.random),
                ("point", parts["point"], (*model.points, *model.buffers)),
            )
        }
        return cls(
            method,
            model,
            history_of(content["run"]),
            ordered["mean"],
            ordered["scale"],
            ordered["point"],
            {str(k): str(v) for k, v in content.get("ways", {}).items()},
        )
