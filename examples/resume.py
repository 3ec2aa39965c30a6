"""A sampler that is cut off in the middle, resumed from its checkpoint, and ends with the bits of one that was not.

Run: python examples/resume.py [--quick].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import plausible as pl


class PowerCutError(Exception):
    """Stands in for a kill, a full disk or a flat battery."""


def main(quick: bool = False) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    y = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(200, 1, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    method = pl.SGLD(epochs=20 if quick else 500, batch_size=50, lr=2e-5)
    steps = method.plan(len(x)).steps

    def cut(step: int, info: dict[str, float]) -> None:
        if step == 3 * steps // 4:
            raise PowerCutError(f"at step {step} of {steps}, log joint {info['log_joint']:.1f}")

    with tempfile.TemporaryDirectory() as folder:
        place = pl.Checkpoint(Path(folder) / "checkpoint", steps=max(1, steps // 10))  # a folder is enough: every 30 s
        try:
            pl.fit(net, (x, y), method, checkpoint=place, callbacks=[cut])
        except PowerCutError as error:
            print("cut off", error)
        resumed = pl.fit(net, (x, y), method, checkpoint=place)
        print(f"resumed and finished: {resumed.run['steps']} steps, {len(resumed.store)} draws")
        whole = pl.fit(net, (x, y), method)
        print("the same bits as a run without a cut:", torch.equal(resumed.functions(x), whole.functions(x)))

        try:
            pl.fit(net, (x + 1, y), method, checkpoint=place)
        except ValueError as error:
            print("other data are refused:", str(error).replace(folder, "…"))


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
