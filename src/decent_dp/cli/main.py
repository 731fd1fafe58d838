"""The program: finds the command, runs it, turns errors into one line and an exit code."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import decent_dp
from decent_dp.cli.parsing import Parser
from decent_dp.errors import ConfigurationError, DecentDPError

COMMANDS = {
    "topology": ("decent_dp.cli.topology", "list, show and compare topologies"),
    "measure": ("decent_dp.cli.measure", "time a model and the network, under torchrun"),
    "plan": ("decent_dp.cli.plan", "predict step times from a measurement, and recommend"),
    "simulate": ("decent_dp.cli.simulate", "train virtual workers on a small problem, under a simulated clock"),
    "inspect": ("decent_dp.cli.inspect", "say what is inside of a checkpoint"),
    "export": ("decent_dp.cli.export", "write the consensus model of a checkpoint as a file"),
}
"""The module of each command, and its line in the help. A module has ``add(subparsers)``, which adds a parser of that
name, and ``run(args)``, which does the work and returns an exit code or None. It is imported when it is called for."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141

_EPILOG = """\
exit codes:
  0    done
  1    failed: a file, a missing package, other workers
  2    refused: what was asked for cannot work
  130  interrupted
  141  whoever read the output has stopped reading
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The arguments, those of the process without it.

    Returns:
        The exit code: 0 done, 1 failed, 2 refused, 130 interrupted, 141 the reader of the output is gone.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
        prog="decent-dp",
        description="Decentralized data-parallel training: topologies, costs, checkpoints.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"decent-dp {decent_dp.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    try:
        try:
            modules = _add_commands(subparsers, given)
            args = parser.parse_args(given)
            code = modules[args.command].run(args) or 0
        except SystemExit as ended:  # of help, and of arguments that cannot be parsed
            code = ended.code if isinstance(ended.code, int) else EXIT_FAILED
        if sys.stdout is not None:  # a process may have none
            sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes once more when it ends, and would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except ConfigurationError as error:
        return _fail(str(error), EXIT_USAGE)
    except DecentDPError as error:
        return _fail(str(error), EXIT_FAILED)
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", EXIT_FAILED)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):  # torch's MemoryError
            raise
        return _fail("this does not fit into memory; ask for less: fewer workers, steps or coordinates", EXIT_FAILED)
    return code


def _add_commands(subparsers: Any, given: Sequence[str]) -> dict[str, ModuleType]:
    """Add the command that is given, and the names of the others."""
    modules = {}
    for name, (path, line) in COMMANDS.items():
        if name in given:
            modules[name] = import_module(path)
            modules[name].add(subparsers)
        else:
            subparsers.add_parser(name, help=line)
    return modules


def _fail(message: str, code: int) -> int:
    print(f"decent-dp: {' '.join(message.split())}", file=sys.stderr)
    return code
