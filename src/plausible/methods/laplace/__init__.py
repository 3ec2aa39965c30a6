"""A Gaussian around a mode."""
