"""The posterior that a sampler leaves on a plane through the space of weights."""

from __future__ import annotations

from typing import Any

from plausible.posteriors.draws import DrawsPosterior


class SubspacePosterior(DrawsPosterior):
    """Draws of a network whose weights are a function of a few coordinates.

    `run["subspace"]` is what the sampler says of all its draws of the coordinates, of which these are some.
    """

    kind = "subspace"

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Those of the draws that are kept, the divergences among all, and in `coordinates` what the sampler says of itself."""
        inner = self.run["subspace"]
        return super().diagnostics(x) | {"divergences": inner.get("divergences", 0), "coordinates": inner}
