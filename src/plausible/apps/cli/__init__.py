"""The command line: `plausible fit`, `predict`, `info`, `methods` and `demo`."""

from plausible.apps.cli.app import app, main

__all__ = ["app", "main"]
