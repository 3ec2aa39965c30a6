"""The sum over one pass, under its former name."""

from plausible.core.passes import accumulate

__all__ = ["accumulate"]
