"""How much memory there is, asked before it is needed."""

from __future__ import annotations

import torch


def available(device: torch.device) -> int | None:
    """Free bytes on the device, or None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Raise a MemoryError with the estimate where `needed` bytes are clearly more than there are."""
    free = available(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"{what}: about {needed / 2**30:,.1f} GiB are needed and {free / 2**30:,.1f} GiB are free on {device}; "
            "use fewer members, a smaller network, or another device"
        )
