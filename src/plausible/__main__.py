"""`python -m plausible` is the command line."""

from plausible.apps.cli import main

main()
