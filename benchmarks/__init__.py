"""Ratios against plain PyTorch, measured interleaved in one run: `python -m benchmarks`, or `make bench`."""
