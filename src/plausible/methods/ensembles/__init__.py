"""Combinators that repeat another method."""
