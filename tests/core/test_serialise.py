"""Settings survive the way through JSON, and a file can do nothing but name known classes and their fields."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from plausible.core.serialise import Opaque, check_count, check_number, decode, encode, register


@register
@dataclass(frozen=True)
class Leaf:
    size: float = 1.0
    extra: Any = None

    def __post_init__(self) -> None:
        check_number(self, "size", above=0)


@register(name="tests.Tree")
@dataclass(frozen=True)
class Tree:
    left: Any
    right: Any = None
    cached: int = field(default=7, init=False)


@dataclass(frozen=True)
class Stranger:
    value: int = 0


def through_json(value: Any, **settings: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, **settings), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.1,
        1e-320,
        "inf",
        "",
        math.inf,
        -math.inf,
        (1, (2.5, "x"), ()),
        {"a": (1, None), "b": {"c": math.inf}},
        Leaf(2.0),
        Tree(Leaf(0.1), (Leaf(), Tree(None, "x"))),
        Opaque("function"),
    ],
)
def test_round_trip_keeps_value_and_type(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_lists_tensors_and_numpy() -> None:
    assert math.isnan(through_json(math.nan))
    assert through_json([1, [2]]) == (1, (2,))
    assert through_json(torch.tensor(0.5)) == 0.5
    assert through_json(torch.tensor([[1, 2], [3, 4]])) == ((1, 2), (3, 4))
    assert through_json(np.array([1.0, math.inf])) == (1.0, math.inf)
    assert through_json(np.float32(0.25)) == 0.25
    back = through_json(np.int64(3))
    assert back == 3
    assert type(back) is int


def test_names_in_the_file() -> None:
    assert encode(Leaf(2.0)) == {"type": "test_serialise.Leaf", "size": 2.0, "extra": None}
    assert encode(Tree(1)) == {"type": "tests.Tree", "left": 1, "right": None}

    @dataclass(frozen=True)
    class Walk:
        steps: int = 1

    Walk.__module__, Walk.__qualname__ = "plausible.methods.walk", "Walk"
    register(Walk)
    assert encode(Walk()) == {"type": "Walk", "steps": 1}


@pytest.mark.parametrize("value", [math.sin, lambda x: x, Stranger(), object(), torch.nn.Tanh(), {1, 2}, 1j])
def test_unknown_objects_are_refused_or_opaque(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be stored"):
        encode(Leaf(1.0, extra=(value,)))
    (back,) = through_json(Leaf(1.0, extra=(value,)), strict=False).extra
    assert back == Opaque(getattr(value, "__qualname__", type(value).__qualname__))


def test_large_tensors_do_not_belong_into_settings() -> None:
    with pytest.raises(TypeError, match=r"\(200, 100\)"):
        encode(torch.zeros(200, 100))
    assert encode(torch.zeros(200, 100), strict=False) == {"opaque": "Tensor"}


@pytest.mark.parametrize("key", ["type", "opaque"])
def test_reserved_words(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        encode({key: 1})
    bad = dataclass(frozen=True)(type("Bad", (), {"__annotations__": {key: int}}))
    with pytest.raises(ValueError, match=key):
        register(bad)


def test_mapping_keys_are_strings() -> None:
    with pytest.raises(TypeError, match="keys"):
        encode({1: 2})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "os.system", "command": "true"}, "unknown type 'os.system'"),
        ({"type": ["priors"]}, "unknown type"),
        ({"type": "test_serialise.Leaf", "size": 1.0, "colour": 1}, "unknown field 'colour'"),
        ({"type": "tests.Tree", "left": 1, "cached": 8}, "unknown field 'cached'"),
        ({"type": "tests.Tree"}, "left"),
        ({"type": "test_serialise.Leaf", "size": -1.0}, "size must be finite and above 0"),
        ({"type": "test_serialise.Leaf", "size": "big"}, "size must be a number"),
        ({"type": "float", "value": "1e3"}, "stored float"),
        ({"type": "float", "value": ["inf"]}, "stored float"),
        ({"opaque": "f", "more": 1}, "opaque"),
        ({"a": {1, 2}}, "JSON"),
    ],
)
def test_tampered_settings_are_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode([data])


def test_depth_is_bounded() -> None:
    data: Any = 1
    for _ in range(100_000):
        data = [data]
    with pytest.raises(ValueError, match="nested"):
        decode(data)
    while isinstance(data, list):  # unwound by hand: freeing the nest recursively is the interpreter's own affair
        data = data[0]


def test_expected_type() -> None:
    assert decode(encode(Leaf()), expect=Leaf) == Leaf()
    with pytest.raises(ValueError, match="Tree is expected"):
        decode(encode(Leaf()), expect=Tree)


def test_registering() -> None:
    with pytest.raises(TypeError, match="dataclass"):
        register(int)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"belongs to .*Tree already"):
        register(Stranger, name="tests.Tree")
    register(Tree, name="tests.Tree")  # the same class again, as after a reload


def test_checks_convert_and_refuse() -> None:
    leaf = Leaf(torch.tensor(2))  # type: ignore[arg-type]
    assert leaf.size == 2.0
    assert type(leaf.size) is float
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="Leaf: size must be finite and above 0"):
            Leaf(bad)
    for wrong in ("1", None, True, torch.ones(2)):
        with pytest.raises(TypeError, match="Leaf: size must be a number"):
            Leaf(wrong)  # type: ignore[arg-type]

    @dataclass(frozen=True)
    class Count:
        number: int

        def __post_init__(self) -> None:
            check_count(self, "number")

    assert Count(np.int32(3)).number == 3  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        Count(0)
    with pytest.raises(TypeError, match="whole number"):
        Count(1.5)  # type: ignore[arg-type]
