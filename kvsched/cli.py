"""The command `kvsched`: picks a subcommand and hands over to it.

Owns: the table of subcommands, and what becomes of an error on the way to the user.
Knows nothing about: what a subcommand does. Each one is a module with `add_arguments(parser)` and `run(args) -> int`
(the exit code), imported only when it is the one asked for.
Invariants: `kvsched --help` imports none of them. A `ValueError` (bad input, by the rule of the house) or a file that
cannot be read ends as one line on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kvsched import __version__


class Command(NamedTuple):
    """module: where `add_arguments` and `run` are. help: one line for `kvsched --help`."""

    module: str
    help: str


COMMANDS = {
    "run": Command("kvsched.experiment.run_command", "serve a workload; without one, a short demonstration"),
    "conformance": Command("kvsched.conformance.command", "replay decisions recorded from vLLM and compare each one"),
    "exactness": Command(
        "kvsched.experiment.exactness_command", "compare the engine's greedy tokens with the model's own"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvsched ARGUMENTS` (`sys.argv[1:]` when None); the exit code.

    Exit codes: 0 and 1 as the subcommand says, 2 bad input, 130 interrupted. Raises SystemExit as argparse does.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    asked = next((word for word in given if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="kvsched", description="The scheduler of an LLM server, to run, break and compare.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvsched {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen: Any = None
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name == asked:
            chosen = import_module(command.module)
            chosen.add_arguments(subparser)
    args = parser.parse_args(given)
    try:
        return int(chosen.run(args))
    except (ValueError, OSError) as error:
        print(f"kvsched {asked}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
