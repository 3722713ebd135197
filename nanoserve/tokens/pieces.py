"""From a token's spelling in a vocabulary to the bytes it prints.

Two spellings exist among decoder models. Byte-level BPE (Radford et al. 2019) writes each byte as one printable
character; SentencePiece (Kudo & Richardson 2018) writes a space as "▁" and a byte it has no piece for as "<0xNN>".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Spelling = Literal["byte_level", "sentencepiece"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 bytes are themselves, the 68 others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
_ALPHABET_CHARACTERS = frozenset(_ALPHABET)
_TO_LATIN_1 = str.maketrans({character: chr(byte) for character, byte in _ALPHABET.items()})
_SPELLED = {byte: character for character, byte in _ALPHABET.items()}


def spell_bytes(raw: bytes) -> str:
    """The byte-level spelling of these bytes."""
    return "".join(_SPELLED[byte] for byte in raw)


def is_byte_spelled(token: str) -> bool:
    return _ALPHABET_CHARACTERS.issuperset(token)


@dataclass(frozen=True)
class TokenPieces:
    """The bytes of every token id.

    spelling       how ordinary tokens are written
    token_of       id → the vocabulary's text for it, or None past its end
    special_ids    control tokens: they print nothing
    added_ids      tokens outside the trained vocabulary ("<think>"), written as they print
    byte_fallback  "<0xNN>" is a byte
    """

    spelling: Spelling
    token_of: Callable[[int], str | None]
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    byte_fallback: bool = True

    def token_bytes(self, token_id: int) -> bytes:
        token = self.token_of(token_id)
        if token is None or token_id in self.special_ids:
            return b""
        if self.spelling == "byte_level":
            # A token beyond the alphabet can only be plain text that was not spelled at all.
            if token_id in self.added_ids or not is_byte_spelled(token):
                return token.encode()
            return token.translate(_TO_LATIN_1).encode("latin-1")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()
