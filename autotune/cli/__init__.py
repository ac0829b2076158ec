"""The command line: parse and print only; each verb imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import typer

from autotune.cli import admin, query, stale, tables, tune
from autotune.cli.options import takes_layer
from autotune.cli.output import Failure, notice, one_line

# plain help and tracebacks: the same text on a terminal, in a pipe and in a log
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}

app = typer.Typer(**_PLAIN, help="Find, check and remember the fastest kernel for each convolution layer.")
app.command("devices")(admin.devices)
app.command("tune")(takes_layer(tune.tune, unless="stale"))
app.command("query")(takes_layer(query.query))
app.command("trials")(takes_layer(tables.trials))
app.command("export")(tables.export)
app.command("import")(tables.import_)
_db = typer.Typer(**_PLAIN, help="Look after the tuning database.")
_db.command("check")(admin.check)
_db.command("stale")(stale.stale)
_db.command("upgrade")(admin.upgrade)
app.add_typer(_db, name="db")

# typer gives this class no public name but as the parent of BadParameter
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

# errors that state a cause outside this program
_EXPECTED = (
    ("autotune.backends", "NoDevice"),
    ("autotune.families", "Unsupported"),
    ("autotune.search", "NoValidConfig"),
    ("autotune.store", "StoreError"),
)


def main() -> None:
    """Run the command line of this process and exit: 0 done, 1 could not do it, 2 wrong usage."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a name that the terminal's encoding lacks is no reason to fail once the work is done
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit status. Errors that are not expected propagate."""
    try:
        status = app(arguments, standalone_mode=False, prog_name="autotune")
        if sys.stdout is None:
            raise Failure("the result could not be printed: stdout is closed")
        sys.stdout.flush()
    except _UsageError as error:
        return _wrong_usage(error)
    except BrokenPipeError:
        # the reader of our output left; the interpreter flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not isinstance(error, _expected()):
            raise
        notice(f"autotune: {one_line(error)}")
        return 1
    # typer turns Ctrl-C into the status 130
    if status == 130:
        notice("autotune: interrupted")
        return 1
    return int(status or 0)


def _wrong_usage(error: Any) -> int:
    command = error.ctx.command_path if error.ctx else "autotune"
    notice(f"{command}: {error.format_message()} (see {command} --help)")
    return 2


def _expected() -> tuple[type[BaseException], ...]:
    # a class can be raised only once its module is loaded
    modules = [(sys.modules.get(module), name) for module, name in _EXPECTED]
    return (Failure, OSError, *(getattr(module, name) for module, name in modules if module))
