"""A model folder that can be served: tiny random weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoserve.tokens.pieces import byte_alphabet
from tests.models.tiny import write_model

BOS, EOS = 0, 1
VOCAB_SIZE = 264
"""Of the model, which has a few logits more than the tokenizer has tokens."""
SPECIALS = ["<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_served_model(folder: Path, variant: str = "llama", **overrides: Any) -> Path:
    """Ids 0 and 1 begin and end a text, then the 256 bytes. `overrides` replace config fields."""
    fields = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS, "eos_token_id": EOS} | overrides
    write_model(folder, variant, **fields)
    vocab = {token: index for index, token in enumerate([*SPECIALS, *byte_alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
