"""Build a Tokenizer from a model folder: tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat
template, in the forms that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.errors import BadCheckpoint
from nanoserve.tokens.chat import ChatTemplate
from nanoserve.tokens.pieces import Spelling, TokenPieces
from nanoserve.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Raises BadCheckpoint, naming the file, for what is missing, malformed or not supported."""
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config, _read_json(folder / "special_tokens_map.json"))
    backend = _open_backend(folder)
    _add_configured_tokens(backend, config, folder / "tokenizer_config.json")
    spelling, byte_fallback, strips_leading_space = _read_decoder(backend, folder)
    added = backend.get_added_tokens_decoder()
    ids = {name: _id_of(backend, name, token, folder) for name, token in named.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    special = {token_id for token_id, token in added.items() if token.special}
    special |= {token_id for token_id in ids.values() if token_id is not None}
    prefix, suffix = _frame(backend)
    return Tokenizer(
        backend,
        TokenPieces(
            spelling,
            lambda token_id: backend.id_to_token(token_id) if 0 <= token_id < 2**31 else None,
            frozenset(special),
            frozenset(added),
            byte_fallback,
        ),
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        bos_token_id=bos,
        eos_token_ids=frozenset() if eos is None else frozenset({eos}),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_leading_space=strips_leading_space,
        chat_template=_chat_template(folder, config, named),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object, or an empty one where there is no file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like → text; in the files each is a string or an object with `content`.

    The map is the older file: it wins where the config is as old, which shows by its listing no added tokens.
    """

    def texts(names: Mapping[str, Any]) -> dict[str, str]:
        entries = {name: names.get(name) for name in _NAMED_TOKENS}
        found = {name: entry.get("content") if isinstance(entry, Mapping) else entry for name, entry in entries.items()}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    if "added_tokens_decoder" in config:
        return {**texts(special_map), **texts(config)}
    return {**texts(config), **texts(special_map)}


def _open_backend(folder: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.exists():
        return _converted_backend(folder)
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # The library raises a bare Exception for any malformed file.
        raise BadCheckpoint(f"{path} is not a tokenizer that can be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _converted_backend(folder: Path) -> tokenizers.Tokenizer:
    """Older checkpoints hold vocabulary files of their own kind; transformers knows how to convert them."""
    missing = f"{folder} has no tokenizer.json, and transformers cannot make one from what is there"
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"{missing}: {reason}") from error
    backend: tokenizers.Tokenizer | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise BadCheckpoint(f"{missing}: it has no fast tokenizer for {type(converted).__name__}")
    return backend


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Tokens that only tokenizer_config.json lists join those of tokenizer.json, with the ids it gives them."""
    from tokenizers import AddedToken

    try:
        listed = sorted((int(key), dict(entry)) for key, entry in (config.get("added_tokens_decoder") or {}).items())
        contents = [str(entry["content"]) for _, entry in listed]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{path}: added_tokens_decoder is not a table of id → token: {error!r}") from error
    known = backend.get_added_tokens_decoder()
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for (token_id, entry), content in zip(listed, contents, strict=True):
        if token_id in known:
            continue
        backend.add_tokens([AddedToken(content, **{flag: bool(entry.get(flag)) for flag in flags})])
        if (got := backend.token_to_id(content)) != token_id:
            raise BadCheckpoint(
                f"{path}: added_tokens_decoder gives {content!r} the id {token_id}, where tokenizer.json leads to {got}"
            )


def _id_of(backend: tokenizers.Tokenizer, name: str, token: str, folder: Path) -> int | None:
    token_id: int | None = backend.token_to_id(token)
    if token_id is None and name in ("bos_token", "eos_token"):
        raise BadCheckpoint(f"{folder}: {name} is {token!r}, which the vocabulary does not have")
    return token_id


def _read_decoder(backend: tokenizers.Tokenizer, folder: Path) -> tuple[Spelling, bool, bool]:
    """(spelling, byte fallback, strips the leading space), read off the steps of the tokenizer's decoder."""
    decoder = backend.decoder
    outer = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = outer.get("decoders", [outer])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False, False
    space = any(step.get("type") == "Replace" and step.get("content") == " " for step in steps)
    if space or "Metaspace" in kinds:
        strips = any(
            (step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return "sentencepiece", "ByteFallback" in kinds, strips
    raise BadCheckpoint(
        f"{folder}: the tokenizer's decoder is {' + '.join(map(str, kinds)) if outer else 'missing'}; "
        "ByteLevel and SentencePiece decoders are supported"
    )


def _frame(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids before, ids after) a raw prompt. tokenizer.json's post-processor decides, as in transformers, whatever the
    flags in tokenizer_config.json say; a probe shows what it adds."""
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    extra = len(framed) - len(bare)
    at = next((start for start in range(extra, -1, -1) if framed[start : start + len(bare)] == bare), 0)
    return tuple(framed[:at]), tuple(framed[at + len(bare) :])


def _chat_template(folder: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja where there is one, else tokenizer_config.json's `chat_template`: text, or a list, of which
    the template named "default" serves chats."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(path.read_text("utf-8"), variables=named, origin=str(path))
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = by_name.get("default")
    if not isinstance(template, str):
        return None
    return ChatTemplate(template, variables=named, origin=str(folder / "tokenizer_config.json"))
