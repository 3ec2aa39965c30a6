"""The sum over one pass, under its former name."""

from plausible.core.data import accumulate

__all__ = ["accumulate"]
