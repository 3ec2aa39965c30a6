"""Trajectories of small perceptrons as generated machine code: C++ on a CPU, Triton on a GPU."""
