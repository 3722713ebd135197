"""A model folder that `build_engine` can load: tiny random weights and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoserve.tokens.pieces import byte_alphabet
from tests.models.tiny import write_model

VOCAB_SIZE = 258


def write_folder(folder: Path, **overrides: Any) -> Path:
    """Ids 0 to 255 are bytes, 256 ends a text and 257 begins one. One layer; `overrides` replace config fields."""
    fields = {"vocab_size": VOCAB_SIZE, "eos_token_id": 256, "bos_token_id": 257, "num_hidden_layers": 1}
    write_model(folder, **{**fields, **overrides})
    vocab = {token: index for index, token in enumerate([*byte_alphabet(), "</s>", "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("</s>", "<s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return folder
