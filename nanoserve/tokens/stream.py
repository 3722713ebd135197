"""Turn one sequence's token ids into text as they come: whole characters, and nothing a stop may still take.

Owns the sequence's half-read character and its held-back text. Knows no request, no queue and no tokenizer file.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether the text of an answer begins after the one space that its first word's token carries."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token prints; none for a special token. Need not be whole characters."""


class StreamDecoder:
    """The text of one sequence, and where it stops.

    What `push` and `finish` return, joined, is a function of the tokens' bytes and the stops alone: the bytes decoded
    as UTF-8 with errors replaced, cut exactly before the earliest stop string in them. How the bytes fall into tokens
    changes only when a piece arrives. Of overlapping stop strings the one that begins first wins, so a complete match
    waits while another that began before it may still complete. Stop strings are sought in this sequence's text, never
    in the prompt's. The work is linear in the text for each stop string.

    `continues_text` says that the answer goes on from prompt text that the reader has: the space its first token may
    begin with then belongs to it ("The capital of" -> " Paris"), whatever the tokenizer strips from a fresh answer.
    """

    def __init__(self, tokenizer: TokenBytes, stops: Sequence[str] = (), *, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._search = StopSearch(stops) if any(stops) else None
        self._drop_space = tokenizer.strips_leading_space and not continues_text
        self._held = ""
        self._released = 0
        self.stopped = False
        """Whether a stop string ended the text. Once it has, further tokens print nothing."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often all it prints, sometimes nothing, sometimes more."""
        if self.stopped:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._drop_space and raw:
            self._drop_space = False
            raw = raw.removeprefix(b" ")
        return self._release(self._utf8.decode(raw), final=False)

    def finish(self) -> str:
        """What was held back. A character the sequence ended inside of is U+FFFD. `stopped` may become True here, where
        a complete stop string was waiting for one that began before it. Calling again returns nothing."""
        if self.stopped:
            return ""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._release(text, final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self._search is None:
            return text
        self._held += text
        self._search.feed(text)
        self.stopped = self._search.decided or (final and self._search.match is not None)
        if self.stopped and self._search.match is not None:
            count = self._search.match - self._released
        else:
            count = len(self._held) if final else self._search.certain - self._released
        ready = self._held[:count]
        self._held = "" if self.stopped else self._held[count:]
        self._released += count
        return ready


class StopSearch:
    """The earliest of several stop strings in a text that arrives in pieces.

    Each stop string is followed by its own automaton (Knuth, Morris, Pratt 1977), so no character is looked at twice:
    `_lengths[i]` is how much of stop i the text ends with, hence where a match that is still open began. All
    offsets count characters from the start of the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._lengths = [0] * len(self._stops)
        self._seen = 0
        self.match: int | None = None
        """Where the earliest complete match begins, so far."""

    @property
    def certain(self) -> int:
        """Text before this offset is in no match and cannot become part of one."""
        open_from = self._seen - max(self._lengths, default=0)
        return open_from if self.match is None else min(open_from, self.match)

    @property
    def decided(self) -> bool:
        """Whether `match` is final: no match that began before it is still open."""
        return self.match is not None and self._seen - max(self._lengths) >= self.match

    def feed(self, text: str) -> None:
        if self.match is None and not any(self._lengths) and not any(stop[0] in text for stop in self._stops):
            self._seen += len(text)  # most text begins no stop string; this is the whole cost of it
            return
        for character in text:
            if self.decided:
                return
            self._seen += 1
            for index, stop in enumerate(self._stops):
                length = self._lengths[index]
                while length and stop[length] != character:
                    length = self._borders[index][length - 1]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    start = self._seen - length
                    self.match = start if self.match is None else min(self.match, start)
                    length = 0
                self._lengths[index] = length


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
