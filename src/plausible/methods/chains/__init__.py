"""Markov chains and particles on the full data."""
