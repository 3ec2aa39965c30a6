"""The noise of one forward pass: normal numbers and random signs, by purpose, kept for an antithetic partner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plausible.core import random
from plausible.core.weights import Weights


class Noise:
    """The noise of one forward pass: on the CPU a pure function of (key, counter, weight name, purpose).

    `key` is int64 [2], `counter` an integer or an int64 tensor, usually the number of the step: see `plausible.random`, which also
    says what holds on a GPU. Under `torch.func.vmap` map the key or the counter. Make a new one for each forward pass: within one,
    all uses of a sampled weight see one draw.

    `drawn` has the values of the weights that were sampled, by name; `record` says for each weight that was used how its noise
    was drawn: "weights", "local", "flipout" or `FALLBACK`. Pass a dictionary as `record` to have it filled.

    `antithetic=True` keeps the normal noise, so that `mirrored` can give the same pass with −ε and −ζ.
    """

    def __init__(self, key: Tensor, counter: Tensor | int, *, antithetic: bool = False, record: dict[str, str] | None = None):
        if tuple(key.shape) != (2,):
            raise ValueError(
                f"key: got shape {tuple(key.shape)}, expected [2]: one key; for stacked members map the keys with torch.func.vmap"
            )
        self.key, self.counter, self.antithetic = key, counter, antithetic
        self.record: dict[str, str] = {} if record is None else record
        self.drawn: Weights = {}
        self._kept: dict[Any, dict[str, Tensor]] = {}
        self._sign = 1
        self._names: set[str] = set()  # weights that were made
        self._spent: set[str] = set()  # weights whose noise went into the outputs of a linear operation

    @classmethod
    def several(
        cls, key: Tensor, counter: Tensor | int, samples: int, *, antithetic: bool = False, record: dict[str, str] | None = None
    ) -> list[Noise]:
        """The noise of `samples` passes, sample i with the key folded with i (and 0 left as it is).

        With `antithetic`, sample ⌈S/2⌉ + i mirrors sample i, i < ⌊S/2⌋; of an odd number one is without a partner.
        """
        if samples < 1:
            raise ValueError(f"samples: got {samples}, expected at least 1")
        first = samples - samples // 2 if antithetic else samples
        keys = [random.fold(key, i) if i and key.device.type == "cpu" else key for i in range(first)]
        noises = [cls(each, counter, antithetic=antithetic, record=record) for each in keys]
        return noises + [noise.mirrored() for noise in noises[: samples - first]]

    def mirrored(self) -> Noise:
        """The antithetic partner: −ε and −ζ where this pass has ε and ζ, and the same random signs.

        Both share their noise in memory, so that it also holds where PyTorch's generator draws it, on a GPU.
        """
        if not self.antithetic:
            raise ValueError("mirrored: this noise is not kept; make it with Noise(key, counter, antithetic=True)")
        partner = Noise(self.key, self.counter, antithetic=True, record=self.record)
        partner._kept, partner._sign = self._kept, -self._sign
        return partner

    def normal(self, name: str, like: Tensor) -> Tensor:
        """N(0, 1) of the shape, type and device of `like`, for the purpose `name`."""
        return self._kept_or_drawn(name, lambda: {name: random.normal(self._key(name), self.counter, like)})[name]

    def normals(self, like: Mapping[str, Tensor]) -> Weights:
        """N(0, 1) for all of `like` in one draw of the key itself: it depends on which names are drawn together."""
        return self._kept_or_drawn(tuple(like), lambda: random.normal(self.key, self.counter, like))

    def signs(self, name: str, shape: list[int], like: Tensor) -> Tensor:
        """±1 with probability ½ each, of type and device of `like`; the same in both of an antithetic pair."""

        def draw() -> Weights:
            uniform = random.uniform(self._key(name), self.counter, like.new_empty(shape))
            return {name: 1 - 2 * (uniform < 0.5).to(like.dtype)}

        return self._kept_or_drawn(name, draw, sign=1)[name]

    def _kept_or_drawn(self, purpose: Any, draw: Callable[[], Weights], sign: int | None = None) -> Weights:
        found = self._kept.get(purpose) or draw()
        if self.antithetic:
            self._kept[purpose] = found
        return found if (sign or self._sign) == 1 else {name: -noise for name, noise in found.items()}

    def _key(self, name: str) -> Tensor:
        # off the CPU the noise does not depend on the key, and folding is slow
        return random.fold(self.key, _number(name)) if self.key.device.type == "cpu" else self.key

    def _note(self, name: str, way: str) -> None:
        if self.record.get(name) != way:  # compiled steps repeat each assignment
            self.record[name] = way


def _number(name: str) -> int:
    """Sixty-four bits that stand for a name (FNV-1a), in arithmetic that the compiler follows."""
    number = 0xCBF29CE484222325
    for byte in name.encode():
        number = (number ^ byte) * 0x100000001B3 % 2**64
    return number
