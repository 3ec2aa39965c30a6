"""Posteriors on planes through the space of weights."""
