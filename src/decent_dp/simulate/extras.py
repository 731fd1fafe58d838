"""Packages that only some simulations need."""

import importlib
from typing import Any

from decent_dp.errors import DecentDPError


class MissingPackageError(DecentDPError):
    """A simulation needs a package that is not installed."""


def load_extra(module: str, distribution: str, purpose: str) -> Any:
    """Import a module of a package that is no dependency.

    Args:
        module: What to import.
        distribution: What to install for it.
        purpose: What it is wanted for, in words.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {distribution}, which is not installed ({error}); run pip install {distribution}"
        ) from None
