"""Bounds in closed form, by moments through the network."""
