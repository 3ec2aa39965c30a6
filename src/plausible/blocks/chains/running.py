"""Chains over any density, without a network: for tests of laws and for targets of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.blocks.chains.target import Target
from plausible.core import random

if TYPE_CHECKING:
    from plausible.methods.chains.base import Chains


def run(method: Chains, target: Target, position: Tensor, seed: int = 0) -> dict[str, Any]:
    """Warm up and sample from `position` `[rows, P]`.

    Returns `position` `[draws, rows, P]`, all statistics `[draws, chains]`, and the last `state`. Cost: that of `warmup +
    draws · thin` transitions; no checkpoints, no bar.
    """
    kept: list[dict[str, Tensor]] = []
    with torch.no_grad(), random.isolated(seed, position.device):
        state = method.started(target, position, random.key(seed, device=position.device))
        for number in range(method.warmup + method.draws * method.thin):
            state, _ = method.advanced(target, state)
            if number >= method.warmup and (number - method.warmup + 1) % method.thin == 0:
                about = method.about(state)
                joint = about["log_likelihood"] + about["log_prior"]
                kept.append({"position": state.position, "log_joint": joint, **about})
    return {name: torch.stack([draw[name] for draw in kept]) for name in kept[0]} | {"state": state}
