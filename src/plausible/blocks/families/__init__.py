"""Variational families: reparameterised laws q(w; θ) over the named random weights of a model.

    weights = family.draw(θ, noise),   noise ~ N(0, I),   E_q log p(D | w) − KL(q ‖ p) → max over θ

A family (`base.Family`) knows its parameters θ (a flat dict of named tensors), how noise becomes weights, its entropy or the
density of a draw, and its marginal means and scales where they have closed forms. What is common to all is written once:

- `methods.reparameterised.Reparameterised`: the method, which maximises the bound by stochastic gradients. A method of its own is a
  frozen dataclass that adds settings and says `family(weights)`.
- `family_posterior.FamilyPosterior`: the result, drawn anew whenever it is asked.

Each family has its file, imported by the method that uses it.
"""

from plausible.blocks.families.base import Drawn, Family

__all__ = ["Drawn", "Family"]
