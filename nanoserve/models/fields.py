"""Typed look-up in a metadata dict whose every complaint names the file, the field and the value found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, overload

from nanoserve.errors import BadCheckpoint


class Fields:
    """A read-only view of `values`. `where` is the file (and the object in it); null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def refuse(self, field: str, needed: str) -> NoReturn:
        value = repr(self.get(field))
        shown = value if len(value) <= 80 else value[:77] + "…"
        raise BadCheckpoint(f"{self.where}: {self._prefix}{field} is {shown}; {needed}")

    def get(self, field: str) -> Any:
        return self.values.get(self._prefix + field)

    @overload
    def integer(self, field: str, default: int, *, low: int = 1) -> int: ...
    @overload
    def integer(self, field: str, *, low: int = 1) -> int: ...
    def integer(self, field: str, default: int | None = None, *, low: int = 1) -> int:
        """An int of at least `low`; integral floats are taken. Required where no default is given."""
        value = self.get(field)
        if value is None:
            if default is None:
                raise BadCheckpoint(f"{self.where}: {self._prefix}{field} is missing")
            return default
        number = self.number(field, 0.0)
        if number != int(number) or number < low:
            self.refuse(field, f"an integer of at least {low} is needed")
        return int(value)

    def optional_integer(self, field: str, *, low: int = 1) -> int | None:
        return None if self.get(field) is None else self.integer(field, low=low)

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.refuse(field, "a finite number is needed")
        return float(value)

    def optional_number(self, field: str) -> float | None:
        return None if self.get(field) is None else self.number(field, 0.0)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, "true or false is needed")
        return value

    def text(self, field: str, default: str) -> str:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(field, "a string is needed")
        return value

    def token_ids(self, field: str) -> set[int]:
        """One id or a list of them; absent is the empty set, and so is -1, which some exporters write for "none"."""
        value = self.get(field)
        ids = value if isinstance(value, list) else [] if value in (None, -1) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            self.refuse(field, "a token id or a list of them is needed")
        return set(ids)
