"""Several tasks at once: a dict of likelihoods over a dict of outputs.

Inside, the outputs of all tasks lie side by side as [N, F], and so do their targets as [N, T]: methods see one likelihood whose
targets are independent given f.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, distributions, nn

from plausible.core.data import read_inputs, take
from plausible.core.likelihoods import Likelihood
from plausible.core.networks import how_to_call, private_copy
from plausible.core.serialise import register

PREFIX = "likelihood."


@register
@dataclass(frozen=True)
class Tasks(Likelihood):
    """log p(y | f) = Σ_tasks log p(y_task | f_task).

    `likelihoods` by name, `shapes` of one example's outputs for each, and `targets` of one example's targets. The noise that a task
    learns is the weight `likelihood.TASK.log_scale`.
    """

    likelihoods: Mapping[str, Likelihood]
    shapes: Mapping[str, Sequence[int]]
    kind: ClassVar[str] = "tasks"

    def __post_init__(self) -> None:
        for name, likelihood in self.likelihoods.items():
            if not isinstance(likelihood, Likelihood):
                raise TypeError(f"likelihood of the task {name!r} must be one of plausible.likelihoods, got {likelihood!r}")
        if set(self.likelihoods) != set(self.shapes) or not self.likelihoods:
            asked, given = (", ".join(map(repr, names)) or "none" for names in (self.likelihoods, self.shapes))
            raise ValueError(f"likelihood= is for the tasks {asked}; the outputs of the network that it names are {given}")

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Distribution:  # noqa: ARG002
        raise TypeError(f"several tasks have no one law: ask one of them, such as predictive[{next(iter(self.likelihoods))!r}]")

    def _parts(self, outputs: Tensor, targets: Tensor | None = None) -> Iterator[tuple[str, Tensor, Any]]:
        """Name, outputs [..., N, *O] and targets [N, *T] of each task."""
        rows = outputs.shape[-2]
        first = start = 0
        for name, likelihood in self.likelihoods.items():
            shape = tuple(self.shapes[name])
            own = outputs[..., first : first + math.prod(shape)].unflatten(-1, shape or (1,))
            own = own if shape else own.squeeze(-1)
            first += math.prod(shape)
            places = self.target_shape_of(name)
            count, given = math.prod(places), None
            if targets is not None:
                given = targets[:, start : start + count].reshape(rows, *places)
                given = given.long() if likelihood.kind == "classes" else given
            start += count
            yield name, own, given

    def target_shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of one example's targets of a task."""
        return self.likelihoods[name].target_shape((1, *self.shapes[name]))[1:]

    def part(self, name: str, outputs: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs and weights of one task, as its own likelihood takes them."""
        own = next(found for key, found, _ in self._parts(outputs) if key == name)
        return own, self._weights(name, weights)

    @staticmethod
    def _weights(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mark = f"{PREFIX}{name}."
        return {PREFIX + key.removeprefix(mark): value for key, value in weights.items() if key.startswith(mark)}

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        return (*outputs_shape[:-1], sum(math.prod(self.target_shape_of(name)) for name in self.likelihoods))

    def initial_weights(self, output_shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:  # noqa: ARG002
        found: dict[str, Tensor] = {}
        for name, likelihood in self.likelihoods.items():
            own = likelihood.initial_weights(tuple(self.shapes[name]), dtype=dtype, device=device)
            found |= {f"{PREFIX}{name}.{key.removeprefix(PREFIX)}": value for key, value in own.items()}
        return found

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        self._refuse_broadcasting(outputs, targets)
        each = []
        for name, own, given in self._parts(outputs, targets):
            value = self.likelihoods[name].log_prob(own, given, self._weights(name, weights or {}))
            each.append(value.reshape(*outputs.shape[:-1], -1))
        return torch.cat(each, -1)

    def check(self, outputs_shape: Sequence[int], targets: Tensor, mask: Tensor | None = None) -> Tensor:
        expected = self.target_shape(outputs_shape)
        if tuple(targets.shape) != expected:
            raise ValueError(f"targets of all tasks have shape {list(targets.shape)}, expected {list(expected)}")
        if mask is not None:
            raise ValueError("mask= is for one task: leave out classes by Categorical(ignore_index=-100)")
        found = []
        for name, own, given in self._parts(torch.empty(tuple(outputs_shape), device="meta"), targets):
            try:
                checked = self.likelihoods[name].check(tuple(own.shape), given)
            except (TypeError, ValueError) as error:
                raise type(error)(f"task {name!r}: {error}") from error
            found.append(checked.reshape(len(targets), -1).to(targets.dtype))
        return torch.cat(found, 1)

    def observed(self, targets: Tensor, mask: Tensor | None = None) -> Tensor | None:
        empty = torch.empty((len(targets), sum(map(math.prod, self.shapes.values()))), device="meta")
        seen = [(self.likelihoods[name].observed(given), given) for name, _, given in self._parts(empty, targets)]
        if all(each is None for each, _ in seen):
            return mask
        whole = [torch.ones_like(given, dtype=torch.bool) if each is None else each for each, given in seen]
        joined = torch.cat([each.reshape(len(targets), -1) for each in whole], 1)
        return joined if mask is None else joined & mask

    def packed_outputs(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """The outputs of all tasks side by side: [N, F]."""
        return torch.cat(
            [outputs[name].flatten(1) if outputs[name].ndim > 1 else outputs[name][:, None] for name in self.likelihoods], 1
        )

    def packed(self, targets: Mapping[str, Any]) -> Tensor:
        """The targets of all tasks side by side: [N, T], whole numbers among them as floating-point numbers."""
        if missing := [name for name in self.likelihoods if name not in targets]:
            raise ValueError(f"y has no targets of the task {missing[0]!r}; it has {', '.join(map(repr, targets))}")
        columns = []
        for name, likelihood in self.likelihoods.items():
            values = torch.as_tensor(targets[name])
            shape = (len(values), *self.target_shape_of(name))
            if tuple(values.shape) != shape:
                raise ValueError(f"task {name!r}: targets have shape {list(values.shape)}, expected {list(shape)}")
            if likelihood.kind == "classes" and values.is_floating_point():
                raise TypeError(f"task {name!r}: targets are {values.dtype}, expected class numbers: pass targets.long()")
            columns.append(values.reshape(len(values), -1).to(torch.get_default_dtype()))
        return torch.cat(columns, 1)


def joined(
    network: nn.Module, likelihood: Mapping[str, Likelihood] | Tasks, data: Any, output: Any = None
) -> tuple[Tasks, Any]:
    """Likelihoods and targets by task as one likelihood, and data whose targets lie side by side; shapes by running the network."""
    if not isinstance(data, tuple | list) or len(data) not in (2, 3) or not isinstance(data[1], Mapping):
        raise TypeError("several tasks need data as (x, y), with y a dict of arrays by the names of the tasks")
    x, y, *rest = data
    if not isinstance(likelihood, Tasks):
        private = private_copy(network).eval()
        first = next((p for p in private.parameters() if p.is_floating_point()), torch.zeros(()))
        arguments, named = how_to_call(private)(take(read_inputs(x, dtype=first.dtype, device=first.device), slice(0, 2)))
        with torch.no_grad():
            found = private(*arguments, **named)
        found = found if output is None else output(found)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"likelihood= is a dict, so the network should return one by the same names, got {type(found).__name__}"
            )
        likelihood = Tasks(dict(likelihood), {n: tuple(found[n].shape[1:]) for n in found if n in likelihood or not likelihood})
    return likelihood, (x, likelihood.packed(y), *rest)
