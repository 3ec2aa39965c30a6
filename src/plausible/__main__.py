"""`python -m plausible` is the command line."""

from plausible.cli import main

main()
