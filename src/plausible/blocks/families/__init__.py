"""Variational families: reparameterised laws q(w; θ) over the named random weights of a model.

    weights = family.draw(θ, noise),   noise ~ N(0, I),   E_q log p(D | w) − KL(q ‖ p) → max over θ

A family (`base.Family`) knows its parameters θ (a flat dict of named tensors), how noise becomes weights, its entropy or the
density of a draw, and its marginal means and scales where they have closed forms. Methods maximise the bound over θ; each says
its `family`.
"""

from plausible.blocks.families.base import Drawn, Family

__all__ = ["Drawn", "Family"]
