"""What bodies hold that this server does not know: ignored, and said once for each name, so that a misspelt field is
found without refusing the clients that send more than we read."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from server.schemas import SamplingBody

MAX_NAMES = 64
MAX_NAME = 64
MAX_BODY_BYTES = 64 * 1024  # looking at a larger one costs more than the line is worth

logger = logging.getLogger("nanoserve.server")


class IgnoredFields:
    """Remembers at most MAX_NAMES names, and after that says no more. Whoever sends them is not told."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note_body(self, raw: bytes, kind: type[SamplingBody]) -> None:
        """`raw` is JSON that decodes to a `kind`."""
        if len(self._said) < MAX_NAMES and len(raw) <= MAX_BODY_BYTES and logger.isEnabledFor(logging.INFO):
            self.note(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), kind)

    def note(self, names: Iterable[str], kind: type[SamplingBody], *, known: frozenset[str] = frozenset()) -> None:
        """`known` are names beside the fields of `kind`."""
        for name in names:
            if name in kind.__struct_fields__ or name in known or name[:MAX_NAME] in self._said:
                continue
            if len(self._said) >= MAX_NAMES:
                return
            self._said.add(name[:MAX_NAME])
            logger.info("field %r of a request is not known here and is ignored (said once)", name[:MAX_NAME])
