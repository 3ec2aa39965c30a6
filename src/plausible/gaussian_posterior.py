"""Posteriors that are independent Gaussians over the weights: drawn anew whenever they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible import random, storage
from plausible import weights as tree
from plausible.data import num_rows
from plausible.model import Model
from plausible.posterior import Posterior, _check_draws, record_of
from plausible.predictive import Draws
from plausible.variational import entropy, expected_log_prior
from plausible.weights import Weights

if TYPE_CHECKING:
    from plausible.engine import Fitted

DRAWS = 100
"""Draws that are taken where none are asked for."""


class GaussianPosterior(Posterior):
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

    def plan_draws(self, draws: int | None, seed: int) -> tuple[int, int]:
        """How many, and the seed."""
        return (DRAWS if draws is None else draws), seed

    def count(self, plan: tuple[int, int]) -> int:
        """How many."""
        return plan[0]

    def _sampled(self, first: int, count: int, seed: int) -> Weights:
        """Draws number first … first+count−1, stacked, with the points beside them."""
        drawn: dict[str, list[Tensor]] = {name: [] for name in self.means}
        for number in range(first, first + count):
            stream = random.generator(seed, 9, number)
            for name, mean in self.means.items():
                noise = torch.randn(mean.shape, generator=stream, dtype=mean.dtype)
                drawn[name].append(noise)
        stacked = {
            name: self.means[name] + self.scales[name] * torch.stack(noise).to(self.means[name])
            for name, noise in drawn.items()
        }  # fmt: skip
        return stacked | {name: value.expand(count, *value.shape) for name, value in self.points.items()}

    def evaluate(self, plan: tuple[int, int], x: Any) -> Draws:
        """All draws by vmap in chunks, or one by one where vmap has no rule."""
        total, seed = plan
        size = max(1, tree.num_elements(self.means) * 4)
        chunk = max(1, min(total, 2**28 // size, 2**17 // max(1, num_rows(x))))
        outputs, noises = [], []
        for first in range(0, total, chunk):
            count = min(chunk, total - first)
            stacked = self._sampled(first, count, seed)
            outputs.append(self._stacked_outputs(stacked, x, count))
            noises.append(self.model.noise(stacked))
        return Draws(torch.cat(outputs), tree.concatenate(noises))

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """Draws of the random weights, named, stacked on a leading axis."""
        total, seed = self.plan_draws(_check_draws(draws), seed)
        return tree.select(self._sampled(0, total, seed), self.means)

    # -----------------------------------------------------------------------------------------------------------------
    # About q

    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats: exact where the prior has a closed form, else over `samples` draws of the rest."""
        wide = {name: mean.double() for name, mean in self.means.items()}
        scales = {name: scale.double() for name, scale in self.scales.items()}
        closed, rest = expected_log_prior(self.model.prior, wide, scales)
        value = -entropy(scales) - closed
        if rest:
            stream = random.generator(seed, 11)
            parts = []
            for _ in range(samples):
                drawn = {
                    n: wide[n]
                    + scales[n] * torch.randn(wide[n].shape, generator=stream, dtype=torch.float64).to(wide[n])
                    for n in rest
                }
                parts.append(self.model.prior.log_prob(drawn))
            value = value - torch.stack(parts).mean()
        return float(value)

    def snr(self, decibels: bool = False) -> Weights:
        """|μ|/σ of each weight, by name; in decibels 20·log₁₀(|μ|/σ)."""
        ratios = {name: mean.abs() / self.scales[name] for name, mean in self.means.items()}
        return {name: 20 * ratio.log10() for name, ratio in ratios.items()} if decibels else ratios

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """`kl` in nats, and the quartiles of the signal-to-noise ratios; draws are independent, so there are no chains to judge."""
        ratios = torch.cat([ratio.flatten() for ratio in self.snr().values()]).double().cpu()
        quartiles = torch.quantile(ratios[:: -(-len(ratios) // 100_000)],
                                   torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))  # fmt: skip
        return {
            "draws": None,
            "chains": 1,
            "divergences": 0,
            "kl": self.kl(samples=100),
            "snr_quartiles": quartiles.tolist(),
        }

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
        from plausible.saving import history_of

        path = folder / "gaussian.safetensors"
        found = storage.read_tensors(path, content["gaussian_sha256"])
        device = next(iter(model.initial.values())).device
        parts: dict[str, Weights] = {"mean": {}, "scale": {}, "point": {}}
        for key, value in found.items():
            part, _, name = key.partition(".")
            parts[part][name] = value.to(device)
        for part, names in (
            ("mean", model.random),
            ("scale", model.random),
            ("point", (*model.points, *model.buffers)),
        ):
            expected = {**model.initial, **model.buffers}
            for name in names:
                if name not in parts[part] or parts[part][name].shape != expected[name].shape:
                    raise ValueError(
                        f"{path} does not fit posterior.json: {part} of {name!r} is missing or has another shape"
                    )
        ordered = {part: {n: values[n] for n in names if n in values} for part, values, names in (
            ("mean", parts["mean"], model.random), ("scale", parts["scale"], model.random),
            ("point", parts["point"], (*model.points, *model.buffers)),
        )}  # fmt: skip
        return cls(
            method, model, history_of(content["run"]), ordered["mean"], ordered["scale"], ordered["point"],
            {str(k): str(v) for k, v in content.get("ways", {}).items()},
        )  # fmt: skip
