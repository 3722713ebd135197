"""Text to token ids and back: the tokenizer and its chat template, and the decoder of one sequence's stream."""

from __future__ import annotations

from nanoserve.tokens.stream import StreamDecoder, TokenBytes

__all__ = ["StreamDecoder", "TokenBytes"]
