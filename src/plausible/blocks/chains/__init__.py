"""Markov chains over all weights at once: densities, integrators, metrics, trajectories, adaptation, convergence.

Positions are `[chains, P]`, one row for each chain; named weights appear only at the edges.
"""
