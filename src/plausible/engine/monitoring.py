"""Watching a run from outside: a function of the posterior so far, at the ends of epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Monitor:
    """A callback that sees the posterior as it would be if the run ended now: `fit(…, callbacks=[Monitor(function)])`.

    `function(epoch, posterior)` is called at the end of every `every`-th epoch (and of the last one) and returns a mapping of
    numbers or lists, which `records` keeps beside the epoch: `[{"epoch": 1, "error": 0.12}, …]`. Records travel with checkpoints,
    so a resumed run has those from before it was killed. A posterior that is made in several stages, as that of `Laplace`, is
    shown once, when the last one is over. The function must leave the posterior alone; what it draws does not
    change the run. Cost: what the function costs, and one copy of the state.

        monitor = pl.Monitor(lambda epoch, posterior: {"error": error(posterior.predict(x, draws=10))}, every=10)
        posterior = pl.fit(net, data, pl.MeanField(epochs=100), callbacks=[monitor])
        monitor.records[-1]["error"]
    """

    def __init__(self, function: Callable[[int, Any], Mapping[str, Any] | None], every: int = 1):
        if not callable(function):
            raise TypeError(f"Monitor: function must be a function of (epoch, posterior), got {function!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Monitor: every must be a whole number of epochs of at least 1, got {every!r}")
        self.function, self.every = function, every
        self.records: list[dict[str, Any]] = []

    def __call__(self, step: int, info: Mapping[str, float]) -> None:
        """Steps are of no interest."""

    def due(self, epoch: int, last: bool) -> bool:
        """Whether this epoch is looked at."""
        return last or epoch % self.every == 0

    def observe(self, epoch: int, posterior: Any) -> None:
        """Call the function and keep what it says."""
        found = self.function(epoch, posterior)
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"Monitor: the function must return a mapping of numbers, or None, got {found!r}")
        self.records = [record for record in self.records if record["epoch"] < epoch]
        self.records.append({"epoch": epoch, **{str(k): _plain(v) for k, v in (found or {}).items() if k != "epoch"}})


def _plain(value: Any) -> Any:
    """Python's own numbers for those of NumPy and PyTorch."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
