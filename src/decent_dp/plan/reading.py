"""Fields of a JSON document that know their name, so that an error can say it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from decent_dp.errors import ConfigurationError

_MISSING = object()
_LARGEST = 10**18


class Field:
    """A value somewhere in a document.

    Args:
        document: How messages call the document.
        name: Path of the field in it, such as ``compute.buckets[2].bytes``.
        value: What stands there.
    """

    def __init__(self, document: str, name: str, value: Any) -> None:
        self._document, self._name, self.value = document, name, value

    def __getitem__(self, key: str) -> Field:
        name = f"{self._name}.{key}" if self._name else key
        return Field(self._document, name, self._object().get(key, _MISSING))

    def __contains__(self, key: str) -> bool:
        return key in self._object()

    def refuse(self, rule: str) -> NoReturn:
        """Raise: this field is not what the rule says."""
        if self.value is _MISSING:
            raise ConfigurationError(f"{self._document}: {self._name} is missing; it must be {rule}; measure again")
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        name = self._name or "the whole"
        raise ConfigurationError(f"{self._document}: {name} is {shown}; it must be {rule}; measure again or correct it")

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise if an object has other keys than the known ones."""
        for key in self._object():
            if key not in known:
                raise ConfigurationError(
                    f"{self._document}: {self[key]._name} is not known; known are {', '.join(sorted(known))}; remove it"
                )

    def number(self, least: float | None = None, *, above: float | None = None) -> float:
        """A finite number, not smaller than one bound and larger than another."""
        rule = "a number" + (f" of at least {least:g}" if least is not None else "")
        rule += f" above {above:g}" if above is not None else ""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(rule)
        value = float(value) if abs(value) < _LARGEST else math.inf
        if not math.isfinite(value) or (least is not None and value < least) or (above is not None and value <= above):
            self.refuse(rule)
        return value

    def integer(self, least: int) -> int:
        """A whole number of at least some size."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value < _LARGEST:
            self.refuse(f"a whole number of at least {least}")
        return self.value

    def choice(self, choices: Collection[str]) -> str:
        """One of some texts."""
        if not isinstance(self.value, str) or self.value not in choices:
            self.refuse(" or ".join(map(repr, choices)))
        return self.value

    def items(self) -> Iterator[Field]:
        """The elements of a list, of which there is at least one."""
        if not isinstance(self.value, list) or not self.value:
            self.refuse("a list with at least one element")
        for index, value in enumerate(self.value):
            yield Field(self._document, f"{self._name}[{index}]", value)

    def numbers(self, *, above: float) -> tuple[float, ...]:
        """A list of numbers, at least one."""
        return tuple(item.number(above=above) for item in self.items())

    def texts(self) -> dict[str, str]:
        """An object whose values are texts."""
        for key in self._object():
            if not isinstance(self[key].value, str):
                self[key].refuse("a text")
        return dict(self._object())

    def _object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value
