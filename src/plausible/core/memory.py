"""How much memory there is, asked before it is needed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


def available(device: torch.device) -> int | None:
    """Free bytes on the device, or None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = []
    with contextlib.suppress(OSError):  # what Linux says could be had without swapping
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (left := _container_memory()) is not None:  # a container sees the host's memory and may have less
        known.append(left)
    return min(known, default=None)


def _container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a container's limit (control groups, version 2), where there is one."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # pages of files can be dropped when memory is asked for
        return None if limit == "max" else max(0, int(limit) - used + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def require_memory(
    needed: int, device: torch.device, what: str, advice: str = "use fewer members, a smaller network, or another device"
) -> int | None:
    """What is `available`, or a MemoryError with the estimate where `needed` bytes are clearly more than that."""
    free = available(device)
    if free is not None and needed > free:
        have = f"{free / 2**30:,.1f} GiB are free on {device}"
        raise MemoryError(f"{what}: about {needed / 2**30:,.1f} GiB are needed and {have}; {advice}")
    return free
