"""Posteriors that are a variational family with its parameters: drawn anew whenever they are asked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from plausible.blocks.families import Drawn, Family
from plausible.core import random, storage
from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.serialise import Opaque
from plausible.core.weights import Weights
from plausible.posteriors.base import record_of
from plausible.posteriors.fresh import FreshDraws

if TYPE_CHECKING:
    from plausible.engine import Fitted

MOMENT_DRAWS = 1000
"""Draws for means and scales that have no closed form."""


class FamilyPosterior(FreshDraws):
    """q(w; θ) of a variational family: `parameters` θ by name; `points` are weights and buffers that have no distribution.

    Of a mixture of K components draw s belongs to component s mod K.
    """

    kind = "family"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], parameters: Weights, points: Weights):
        super().__init__(method, model, run)
        self.parameters, self.points = parameters, points
        self.log_evidence = None

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, parameters: Weights) -> FamilyPosterior:
        """From what a run left; the bound of its last epoch is the estimate of log p(D)."""
        points = {name: fitted.state.weights[name] for name in model.points}
        posterior = cls(
            method, model, record_of(fitted), tree.clone(parameters), tree.clone(points | dict(fitted.state.buffers))
        )
        bound = fitted.history.get("elbo")
        posterior.log_evidence = bound[-1] if bound else None
        return posterior

    @functools.cached_property
    def family(self) -> Family:
        """The family over the random weights."""
        return self.method.family(tree.select(self.model.initial, self.model.random))

    # -----------------------------------------------------------------------------------------------------------------
    # Draws

    def _drawn(self, family: Family, parameters: Weights, number: int, seed: int, purpose: int = 9) -> Drawn:
        """Draw number `number`: its noise is a function of the seed, the purpose and the number."""
        like = family.noise(parameters)
        flat = random.normals(seed, purpose, number, count=tree.num_elements(like), like=next(iter(like.values())))
        noise = {name: part.to(like[name].dtype) for name, part in tree.unflatten(flat, like).items()}
        return family.draw(parameters, noise, number % family.components)

    @torch.no_grad()
    def _sampled(self, first: int, count: int, seed: int) -> Weights:
        """Draws number first … first+count−1, stacked, with the points beside them."""
        drawn = [self._drawn(self.family, self.parameters, first + i, seed).weights for i in range(count)]
        return self._kept(tree.stack(drawn)) | {name: value.expand(count, *value.shape) for name, value in self.points.items()}

    # -----------------------------------------------------------------------------------------------------------------
    # About q

    @functools.cached_property
    def means(self) -> Weights:  # type: ignore[override]
        """Marginal means by name: in closed form, or over 1,000 draws where the family has none."""
        return self._kept(self._moments[0])

    @functools.cached_property
    def scales(self) -> Weights:  # type: ignore[override]
        """Marginal standard deviations by name: in closed form, or over 1,000 draws where the family has none."""
        return self._kept(self._moments[1])

    @functools.cached_property
    @torch.no_grad()
    def _moments(self) -> tuple[Weights, Weights]:
        means, scales = self.family.means(self.parameters), self.family.scales(self.parameters)
        if means is None or scales is None:
            totals = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.family.like.items()}
            for number in range(MOMENT_DRAWS):
                drawn = self._drawn(self.family, self.parameters, number, 0, purpose=12).weights
                for name, (mean, square) in totals.items():  # Welford's recursion
                    gap = drawn[name] - mean
                    mean += gap / (number + 1)
                    square += gap * (drawn[name] - mean)
            means = {name: mean for name, (mean, _) in totals.items()}
            scales = {name: (square / (MOMENT_DRAWS - 1)).sqrt() for name, (_, square) in totals.items()}
        return means, scales

    @torch.no_grad()
    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats: exact where there is a closed form, the rest over `samples` draws.

        Not known of a pruned posterior: what is left of q is a marginal that families need not have in closed form.
        """
        if self._masks:
            raise ValueError("kl is not known of a pruned posterior; ask for that of the posterior before prune(…)")
        family = self.method.family({name: w.double() for name, w in self.family.like.items()})
        parameters = {name: value.double() for name, value in self.parameters.items()}
        closed = family.closed(self.model.prior, parameters)
        if not (closed.density or closed.names):
            return float(closed.value)
        total: Tensor = sum(
            family.sampled(self.model.prior, parameters, self._drawn(family, parameters, number, seed, purpose=11), closed)
            for number in range(samples)
        )  # type: ignore[assignment]
        return float(closed.value + total / samples)

    def _known_kl(self) -> float | None:
        return None if self._masks else super()._known_kl()

    def _masked(self, masks: Weights) -> Self:
        """With draws that are 0 where a weight was pruned."""
        pruned = super()._masked(masks)
        pruned.means, pruned.scales = pruned._kept(self.means), pruned._kept(self.scales)
        return pruned

    def _status(self, name: str) -> str:
        return self.family.status(name) if name in self.model.random else super()._status(name)

    # -----------------------------------------------------------------------------------------------------------------

    def _moved(self, model: Model, device: torch.device) -> FamilyPosterior:
        run = {**self.run, "history": self.history}
        return FamilyPosterior(self.method, model, run, tree.to(self.parameters, device), tree.to(self.points, device))

    def _write(self, folder: Path) -> dict[str, Any]:
        parts = {"parameter": self.parameters, "point": self.points}
        named = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
        return {"family_sha256": storage.write_tensors(folder / "family.safetensors", named)}

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> FamilyPosterior:
        from plausible.posteriors.saving import history_of

        path = folder / "family.safetensors"
        if isinstance(method, Opaque):
            raise ValueError(
                f"{str(folder)!r} was fitted by {method.name}, which is your own code: its family cannot be made again; decorate "
                "the class with @plausible.serialise.register and import it before loading"
            )
        found = storage.read_tensors(path, content["family_sha256"])
        device = next(iter(model.initial.values())).device
        parts: dict[str, Weights] = {"parameter": {}, "point": {}}
        for key, value in found.items():
            part, _, name = key.partition(".")
            parts[part][name] = value.to(device)
        expected = {**tree.select(model.initial, model.points), **model.buffers}
        like = tree.to(tree.select(model.initial, model.random), "cpu")
        theta = method.family(like).start(like, 1.0, random.key(0))
        for part, wanted in (("parameter", theta), ("point", expected)):
            for name, value in wanted.items():
                if name not in parts[part] or parts[part][name].shape != value.shape:
                    raise ValueError(f"{path} does not fit posterior.json: {part} {name!r} is missing or has another shape")
        parameters, points = tree.select(parts["parameter"], theta), tree.select(parts["point"], expected)
        return cls(method, model, history_of(content["run"]), parameters, points)
