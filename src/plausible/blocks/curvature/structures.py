"""Curvature of all weights: blocks put together.

`estimate` makes a `Curvature`; with a scale s and precisions τ of the prior it answers for Λ = s·H + diag(τ) what `Block` answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from plausible.blocks.curvature.blocks import KINDS, Block
from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.subset import Subset
from plausible.core.weights import Weights

StructureName = Literal["diag", "block", "kron", "ekfac", "lowrank", "full"]
CurvatureName = Literal["ggn", "fisher", "empirical", "hessian"]
STRUCTURES = ("diag", "block", "kron", "ekfac", "lowrank", "full")
CURVATURES = ("ggn", "fisher", "empirical", "hessian")


class Curvature:
    """H of all random weights, in blocks."""

    def __init__(self, blocks: Sequence[Block], structure: str):
        self.blocks, self.structure = list(blocks), structure

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it covers."""
        return tuple(name for block in self.blocks for name in block.names)

    @property
    def size(self) -> int:
        """How many weights."""
        return sum(block.size for block in self.blocks)

    @property
    def chosen(self) -> int:
        """How many numbers are random: all, or those of a subnetwork."""
        return sum(block.chosen if isinstance(block, Subset) else block.size for block in self.blocks)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Log det Λ, in float64."""
        return torch.stack([block.log_det(precision, scale).double() for block in self.blocks]).sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """The diagonal of Λ⁻¹, by weight."""
        return _joined(block.variances(precision, scale) for block in self.blocks)

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ^{-1/2} ξ, for ξ with a leading axis."""
        return _joined(block.draw(noise, precision, scale) for block in self.blocks)

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ v, for v with a leading axis."""
        return _joined(block.product(vectors, precision, scale) for block in self.blocks)

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """vᵀΛ⁻¹v for one v, in float64."""
        return torch.stack([block.quadratic(vector, precision, scale) for block in self.blocks]).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """SᵀJ Λ⁻¹ JᵀS for each example: [B, K, K]."""
        total: Tensor | None = None
        for block, own in zip(self.blocks, assigned(self.blocks, parts)):
            found = block.covariance(own, precision, scale)
            total = found if total is None else total + found
        assert total is not None
        return total

    def effective(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """1 − τ (Λ⁻¹)_ii: how far the data, and not the prior, determine each weight (MacKay 1992); between 0 and 1."""
        variances = self.variances(precision, scale)
        return {n: torch.where(v > 0, 1 - precision[n] * v, 0.0) for n, v in variances.items()}

    def to(self, device: torch.device) -> Curvature:
        """The same on another device."""
        return Curvature([block.to(device) for block in self.blocks], self.structure)

    def tensors(self) -> dict[str, Tensor]:
        """What is saved: names are `number.name`."""
        return {f"{i}.{name}": v for i, block in enumerate(self.blocks) for name, v in block.tensors().items()}

    def describe(self) -> list[dict[str, Any]]:
        """The kinds and layers of the blocks, as JSON."""
        return [{"kind": block.kind, "layers": [_layer_record(layer) for layer in block.layers]} for block in self.blocks]

    @classmethod
    def restored(cls, structure: str, description: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Curvature:
        """The inverse of `describe` and `tensors`."""
        blocks = []
        for i, entry in enumerate(description):
            layers = [_layer_from(record) for record in entry["layers"]]
            own = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == str(i)}
            blocks.append(KINDS[entry["kind"]].restored(layers, own))
        return cls(blocks, structure)


def _joined(found: Any) -> Weights:
    return {name: value for part in found for name, value in part.items()}


def _layer_record(layer: Layer) -> dict[str, Any]:
    return {
        "names": list(layer.names),
        "kind": layer.kind,
        "shapes": [list(s) for s in layer.shapes],
        "biased": layer.biased,
        "weighted": layer.weighted,
        "transposed": layer.transposed,
        "groups": layer.groups,
    }


def _layer_from(record: Mapping[str, Any]) -> Layer:
    shapes = tuple(tuple(int(n) for n in shape) for shape in record["shapes"])
    return Layer(
        tuple(record["names"]),
        record["kind"],
        shapes,
        bool(record["biased"]),
        bool(record["weighted"]),
        bool(record["transposed"]),
        int(record["groups"]),
    )


def assigned(blocks: Sequence[Block], parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that each block is about; a layer whose bias is in a block of its own is divided."""
    known = {part.layer.names: part for part in parts}
    found = []
    for block in blocks:
        own = []
        for layer in block.layers:
            if layer.names in known:
                own.append(known[layer.names])
            else:
                whole = next(part for part in parts if set(layer.names) <= set(part.layer.names))
                own.append(_divided(whole, layer))
        found.append(own)
    return found


def _divided(part: Part, layer: Layer) -> Part:
    """The weight or the bias of a layer alone."""
    if layer.weighted:
        return Part(layer, part.columns[..., :-1], part.rows)
    rows = part.rows.flatten(3).unsqueeze(3)
    return Part(layer, rows.new_ones(*rows.shape[1:4], 1), rows)


def apart(layer: Layer) -> list[Layer]:
    """The weight and the bias of a layer as two."""
    weight = replace(layer, names=layer.names[:1], shapes=layer.shapes[:1], biased=False)
    return [weight, Layer(layer.names[1:], "matrix", layer.shapes[1:], biased=True, weighted=False)]
