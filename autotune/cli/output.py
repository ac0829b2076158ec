"""What verbs print and how they fail: results on stdout, notices on stderr, one line for an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence


class Failure(Exception):
    """Something could not be done; the one-line reason is printed and the program exits with 1."""


def notice(text: str) -> None:
    """Print a line for the person, not for programs."""
    # closed, it is None, which would mean stdout to ``print``
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    # what nobody can read is no reason to stop; the interpreter flushes once more at exit
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object, in ASCII, whatever the stream can encode."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print one fact a line, values aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """Print rows of text under headings; the columns in ``numbers`` are aligned to the right."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(columns, line, widths, strict=True)
        print("  ".join(c.rjust(w) if name in numbers else c.ljust(w) for name, c, w in cells).rstrip())


def one_line(error: BaseException) -> str:
    """The error's message; for one of the operating system, the file and the reason without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())
