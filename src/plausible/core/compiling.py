"""What compiled CPU steps need to be told: scalars that are worth computing once."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("plausible", "FRAGMENT")
_library.define("hold(Tensor value) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("hold", lambda value: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("plausible::hold", lambda value: torch.empty_like(value), lib=_library)
torch.library.register_vmap(
    "plausible::hold", lambda _info, axes, value: (torch.ops.plausible.hold(value), axes[0]), lib=_library
)


def hold(value: Tensor) -> Tensor:
    """The value itself, computed once where a compiled CPU step would compute it again for every weight it multiplies.

    The compiler inlines scalar expressions (a learning rate with its sine, Adam's corrections with their exponentials) into
    the loops over the weights. This is a call that it cannot look into. Elsewhere it does nothing.
    """
    if torch.compiler.is_compiling() and value.device.type == "cpu":
        return torch.ops.plausible.hold(value)
    return value
