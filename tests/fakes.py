"""Hand-written stand-ins that tests of several modules share. They import no torch and no model files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ByteTokenizer:
    """`nanoserve.tokens.Tokenizer` over raw bytes: ids 0–255 are bytes, 256 is end-of-sequence, 257 is BOS.

    Any text can be scripted token by token (`list("😊".encode())` is four tokens that are no characters). `pieces`
    gives further ids, from 258 on, the bytes of whole strings, so that a scripted model can emit "C D" as one token;
    encoding never produces those. `add_bos` is the model's wish: text and chat prompts then begin with exactly one BOS.
    Ids past the vocabulary print nothing, as in a model with more logit rows than its tokenizer has tokens.
    """

    pieces: tuple[bytes, ...] = ()
    add_bos: bool = False
    eos_token_ids: frozenset[int] = frozenset({256})
    strips_leading_space: bool = False

    EOS = 256
    BOS = 257

    @property
    def vocab_size(self) -> int:
        return 258 + len(self.pieces)

    @property
    def bos_token_id(self) -> int | None:
        return self.BOS

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Bytes as ids; `<eos>` and `<bos>` in the text are single ids where `parse_special`."""
        ids = [self.BOS] if self.add_bos and add_special_tokens else []
        if not parse_special:
            return ids + list(text.encode())
        specials = {"<bos>": [self.BOS], "<eos>": [self.EOS]}
        for part in re.split("(<bos>|<eos>)", text):
            ids += specials.get(part) or list(part.encode())
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode_rendered(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def fewest_tokens(self, text: str) -> int:
        return len(text) // max([5, *map(len, self.pieces)])  # len("<bos>")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """`role: content` lines, then `assistant: ` where the model is to go on."""
        lines = "".join(f"{message['role']}: {message.get('content') or ''}\n" for message in messages)
        return ("<bos>" if self.add_bos else "") + lines + ("assistant: " if add_generation_prompt else "")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return self.pieces[token_id - 258] if 258 <= token_id < self.vocab_size else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        raw = b"".join(self.token_bytes(token_id) for token_id in token_ids)
        return raw[self.strips_leading_space and raw.startswith(b" ") :].decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.EOS, self.BOS)
