"""What a user sees when something fails: one line on stderr, exit code 1 (130 after Ctrl-C); tracebacks on request."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer

from plausible.core.words import printable

P = ParamSpec("P")
R = TypeVar("R")

tracebacks = False
"""Whether `plausible --debug …` asked for tracebacks."""

EXPECTED = (ValueError, TypeError, OSError, MemoryError, ArithmeticError, ImportError)  # of an extra that is not installed


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a line that says what was kept and how to go on."""


def note(message: str) -> None:
    """One line on stderr, so that stdout stays clean for results."""
    typer.echo(f"plausible: {printable(' '.join(message.split()))}", err=True)


def one_line(error: BaseException) -> str:
    """The message of an exception, with the file name first where it is about a file."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return f"out of memory{': ' if text else ''}{text}"
    return text or type(error).__name__


@contextmanager
def plain_warnings(quiet: bool = False) -> Iterator[None]:
    """Warnings and log lines of the library as one line each on stderr; none where `quiet`."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    def show(message: Warning | str, *_: object, **__: object) -> None:
        note(f"warning: {message}")

    logger, handler = logging.getLogger("plausible"), Lines()
    level, propagate = logger.level, logger.propagate
    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=UserWarning, module="plausible")
        warnings.showwarning = (lambda *_, **__: None) if quiet else show
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR if quiet else logging.INFO)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn a user's errors into one line and an exit code; everything unexpected keeps its traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        debug = tracebacks or bool(kwargs.get("debug")) or os.environ.get("PLAUSIBLE_DEBUG", "") not in ("", "0")
        try:
            with plain_warnings(quiet=bool(kwargs.get("quiet"))):
                return command(*args, **kwargs)
        except KeyboardInterrupt as stop:
            note(f"interrupted{': ' if str(stop) else ''}{stop}")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of a pipe went away (`| head`): that is not an error, and nobody is left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except EXPECTED as error:
            if debug:
                raise
            typer.echo(f"plausible: error: {one_line(error)}", err=True)
            raise typer.Exit(1) from None

    return run
