"""Text to token ids and back: the tokenizer and its chat template, and the decoder of one sequence's stream.

Imports neither torch nor transformers, and the tokenizer and template libraries only when a tokenizer is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoserve.tokens.folder_tokenizer import tokenizer_from_folder
from nanoserve.tokens.gguf_tokenizer import tokenizer_from_gguf
from nanoserve.tokens.stream import StreamDecoder, TokenBytes
from nanoserve.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoserve.source import ModelSource

__all__ = ["StreamDecoder", "TokenBytes", "Tokenizer", "load_tokenizer"]


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. Raises BadCheckpoint, naming the file and the field, if it cannot be built exactly."""
    if source.kind == "gguf":
        return tokenizer_from_gguf(source.gguf.metadata, str(source.path))
    return tokenizer_from_folder(source.path)
