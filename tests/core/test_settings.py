"""What a setting may be is said once, by the annotation of its field; values of another kind are refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

import plausible as pl
from plausible.core.serialise import register
from plausible.core.settings import fits
from plausible.methods import registry

WRONG: list[Any] = ["no", [], {}, object(), 1j]


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, torch.tensor(3)], [3.0, True, "3", None]),
        (float, [3, 0.5, torch.tensor(0.5)], [True, "3", 1j, None]),
        (bool, [True, False], [0, "no", None]),
        (int | None, [3, None], [0.5, "x"]),
        (Literal["a", "b"], ["a"], ["c", 1, ["a"]]),
        (Literal["auto"] | float, ["auto", 1.0], ["no", True]),
        (Sequence[str] | str, ["a", ["a", "b"], ("a",)], [3, [3], {"a": 1}]),
        (tuple[float, ...], [(1.0, 2), [1.0]], [("a",), 1.0]),
        (Mapping[str, float], [{"a": 1.0}], [[1.0], "a"]),
        (Callable[[int], int], [abs], ["abs", None]),
        (pl.priors.Gaussian, [pl.priors.Gaussian()], [pl.priors.Laplace(), 1.0]),
        (Any, [object()], []),
    ],
)
def test_values_fit_their_annotations(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


@pytest.mark.parametrize("name", list(registry))
def test_every_setting_of_every_method_is_checked_and_named(name: str) -> None:
    cls = registry[name]
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        for value in WRONG:
            if field.name == "where" and value in ("no", []):
                continue  # patterns, which the network has or has not
            if field.name == "kl_weights" and value == []:
                continue
            with pytest.raises((TypeError, ValueError), match=field.name):
                cls(**{field.name: value})


def test_what_the_class_says_itself_comes_first() -> None:
    with pytest.raises(ValueError, match="MAP: epochs must be at least 1"):
        pl.MAP(epochs=0)
    with pytest.raises(TypeError, match=r"HMC: adapt must be .*, got 'no'"):
        pl.HMC(adapt="no")  # type: ignore[arg-type]


def test_own_classes_are_checked_where_they_are_registered() -> None:
    @register(name="tests.Own")
    @dataclasses.dataclass(frozen=True)
    class Own(pl.MAP):
        strength: float = 1.0

    assert Own(strength=2).strength == 2
    with pytest.raises(TypeError, match="Own: strength must be a number, got 'much' of type str"):
        Own(strength="much")  # type: ignore[arg-type]
