"""Arguments: errors in one line with the way out, help within 80 columns."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from decent_dp.errors import ConfigurationError
from decent_dp.topology import Layout

_WIDTH = 79
_LARGEST = 10**12
_MOST_WORKERS = 4096


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr; subparsers are of the same class."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; an unknown option is named with the nearest known one."""
        given = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_options(given)
        return super().parse_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see '{self.prog} --help'\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        what = action.metavar if isinstance(action, argparse._SubParsersAction) else "/".join(action.option_strings)
        raise argparse.ArgumentError(None, f"unknown {what} {value!r}{hint(str(value), choices)} {_known(choices)}")

    def _refuse_unknown_options(self, given: Sequence[str]) -> None:
        parser = self
        options = set(parser._option_string_actions)
        for word in given:
            if word == "--":
                return
            if not word.startswith("--"):
                parser = parser._subparser(word) or parser
                options |= set(parser._option_string_actions)
            elif (name := word.partition("=")[0]) not in options:
                nearest = hint(name, sorted(options))
                parser.error(f"unknown option {name!r}{nearest}".removesuffix("."))

    def _subparser(self, name: str) -> "Parser | None":
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found = action.choices.get(name)
                return found if isinstance(found, Parser) else None
        return None


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fits 80 columns whatever the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH, max_help_position=24)


def hint(given: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` if something known is near, else a full stop."""
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else "."


def _known(choices: Sequence[str]) -> str:
    return "Known are " + ", ".join(repr(choice) for choice in choices)


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """Read a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 100 else -1
    if not least <= number <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number of at least {least} and at most 10**12")
    return number


def _step(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step; steps are counted from 0")
    return int(text)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the directory of a run's checkpoints, and ``--step``."""
    parser.add_argument("directory", metavar="DIR", help="where the run saves, or the folder of one checkpoint")
    parser.add_argument("--step", type=_step, metavar="T", help="which checkpoint (default: the latest)")


def refuse_too_many(num_workers: int, instead: str) -> None:
    """Refuse more workers than a command line can wait for; ``instead`` says what a Python program may do."""
    if num_workers > _MOST_WORKERS:
        raise ConfigurationError(
            f"--workers {num_workers}: the command line goes up to {_MOST_WORKERS}; a Python program may {instead}"
        )


def add_layout(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--workers`` and ``--nodes``."""
    parser.add_argument("--workers", type=count, required=required, metavar="N", help="workers in all")
    parser.add_argument("--nodes", type=count, metavar="M", help="nodes they share, equally many on each (default: 1)")


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout that ``--workers`` and ``--nodes`` say.

    Raises:
        ConfigurationError: The nodes would not be equally full.
    """
    n, N = args.workers, args.nodes or 1
    if n % N:
        fitting = [nodes for nodes in range(1, n + 1) if n % nodes == 0]
        nearest = sorted(sorted(fitting, key=lambda nodes: abs(nodes - N))[:3])
        raise ConfigurationError(
            f"--workers {n} --nodes {N}: every node has equally many workers; give --nodes "
            + " or ".join(str(nodes) for nodes in nearest)
        )
    return Layout(n, n // N)
