"""Tokenizers from model folders: what transformers reads from the same files, and loud failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from nanoserve.errors import BadCheckpoint
from nanoserve.source import ModelSource
from nanoserve.tokens import Tokenizer, load_tokenizer
from nanoserve.tokens.pieces import byte_alphabet

SPECIALS = ["<s>", "</s>", "<|user|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


def byte_level_backend(*, frames: bool = False) -> Backend:
    """Ids 0–2 are special, then 256 bytes and "hi", then `<think>` (added, prints); `frames` puts `<s>` first."""
    tokens = [*SPECIALS, *byte_alphabet(), "hi"]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[("h", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    if frames:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece_backend(*, strips: bool = True) -> Backend:
    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strips else []))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def write(folder: Path, backend: Backend | None, config: Any = None, **files: str) -> Path:
    """A model folder; `config` is tokenizer_config.json, `files` are further ones, `__` standing for the dot."""
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    default = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**default, **config} if config is not None else default))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("safetensors", folder, "tiny"))


TEXTS = ["", "hi", " hi  there", "é😊\n\t x 123", "<|user|>hi</s>", "a<think>b", "<s>hi", "x\u2028\x85"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("frames", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_ids_and_text_are_transformers_when_read_from_the_same_folder(
    folder: Path, text: str, frames: bool, flags: dict[str, bool]
) -> None:
    """One difference is meant: a BOS that the text already begins with is not doubled."""
    from transformers import PreTrainedTokenizerFast

    write(folder, byte_level_backend(frames=frames), {"tokenizer_class": "PreTrainedTokenizerFast", **flags})
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), load(folder)
    ids = ours.encode(text)
    expected = theirs.encode(text)
    assert ids == (expected[1:] if expected[:2] == [0, 0] else expected)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert (ours.vocab_size, ours.bos_token_id) == (len(theirs), theirs.bos_token_id)


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("text", ["ab", " ab a", "é", "a\nb", ""])
def test_sentencepiece_text_is_transformers_when_decoded(folder: Path, text: str, strips: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    write(folder, sentencepiece_backend(strips=strips), {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), load(folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.strips_leading_space is strips
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_metaspace_decoder_strips_the_space_it_prepends(folder: Path) -> None:
    backend = sentencepiece_backend()
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    assert load(write(folder, backend)).strips_leading_space
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert not load(write(folder, backend)).strips_leading_space


def test_special_tokens_print_nothing_and_added_ones_print(folder: Path) -> None:
    tokenizer = load(write(folder, byte_level_backend()))
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    assert [tokenizer.is_special(each) for each in (0, 1, 2, think[0])] == [True, True, True, False]
    assert tokenizer.decode([0, *think, 2, 1]) == "<think>"
    assert tokenizer.token_bytes(10_000) == tokenizer.token_bytes(-1) == b""


def test_special_tokens_are_plain_text_when_not_parsed(folder: Path) -> None:
    tokenizer = load(write(folder, byte_level_backend()))
    ids = tokenizer.encode("<|user|>", parse_special=False)
    assert 2 not in ids
    assert tokenizer.decode(ids) == "<|user|>"


def test_tokens_are_added_when_only_the_config_lists_them(folder: Path) -> None:
    listed = {"260": {"content": "<think>", "special": False}, "261": {"content": "<|new|>", "special": True}}
    tokenizer = load(write(folder, byte_level_backend(), {"added_tokens_decoder": listed}))
    assert tokenizer.encode("<|new|>") == [261]
    assert tokenizer.is_special(261)
    assert tokenizer.vocab_size == 262


def test_end_token_comes_from_the_special_tokens_map_when_the_config_has_none(folder: Path) -> None:
    names = json.dumps({"eos_token": {"content": "<|user|>"}, "bos_token": "</s>"})
    tokenizer = load(write(folder, byte_level_backend(), {"eos_token": None}, special_tokens_map__json=names))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    write(folder, byte_level_backend(), {"added_tokens_decoder": {}}, special_tokens_map__json=names)
    assert (load(folder).bos_token_id, load(folder).eos_token_ids) == (0, {1})


def test_there_is_no_end_token_when_no_file_names_one(folder: Path) -> None:
    tokenizer = load(write(folder, byte_level_backend(), {"eos_token": None, "bos_token": None}))
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": TEMPLATE}, {}),
        ({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]}, {}),
        ({}, {"chat_template__jinja": TEMPLATE}),
        ({"chat_template": "old"}, {"chat_template__jinja": TEMPLATE}),
    ],
    ids=["text", "list", "file", "file wins"],
)
def test_chat_template_is_found_in_each_place_transformers_writes_it(
    folder: Path, config: dict[str, Any], files: dict[str, str]
) -> None:
    from transformers import PreTrainedTokenizerFast

    write(folder, byte_level_backend(frames=True), {"tokenizer_class": "PreTrainedTokenizerFast", **config}, **files)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load(folder)
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False) == "<s><|user|>hi"
    assert ours.encode_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES)["input_ids"]
    assert ours.encode_chat(MESSAGES).count(0) == 1


def test_chat_has_one_bos_when_the_template_prints_none_but_the_model_wants_it(folder: Path) -> None:
    template = {"chat_template": TEMPLATE.removeprefix("{{ bos_token }}")}
    assert load(write(folder, byte_level_backend(frames=True), template)).encode_chat(MESSAGES)[:2] == [0, 2]
    assert load(write(folder, byte_level_backend(frames=False), template)).encode_chat(MESSAGES)[:1] == [2]


def test_bos_comes_first_when_the_vocabulary_is_too_small_for_the_probe(folder: Path) -> None:
    backend = Backend(models.BPE(vocab={"<s>": 0, "</s>": 1, "z": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert load(write(folder, backend)).encode("z") == [0, 2]


def test_tokenizer_is_converted_when_only_older_vocabulary_files_exist(folder: Path) -> None:
    backend = byte_level_backend()
    vocab = {token: index for index, token in enumerate([*SPECIALS, *byte_alphabet(), "hi"])}
    write(
        folder, None, {"tokenizer_class": "GPT2Tokenizer"}, vocab__json=json.dumps(vocab),
        merges__txt="#version: 0.2\nh i\n", config__json=json.dumps({"model_type": "gpt2"}),
    )  # fmt: skip
    tokenizer = load(folder)
    assert tokenizer.encode("hi é") == backend.encode("hi é").ids
    assert tokenizer.decode(tokenizer.encode("hi é</s>")) == "hi é"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json is not a tokenizer"),
        ({"tokenizer__json": '{"version": "1.0"}'}, r"tokenizer\.json is not a tokenizer"),
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json cannot be read as JSON"),
        ({"tokenizer_config__json": "[1]"}, r"tokenizer_config\.json holds a JSON list"),
        ({"special_tokens_map__json": "3"}, r"special_tokens_map\.json holds a JSON int"),
        ({"tokenizer_config__json": '{"eos_token": "<none>"}'}, r"eos_token is '<none>'"),
        ({"tokenizer_config__json": '{"added_tokens_decoder": {"x": {"content": "y"}}}'}, r"added_tokens_decoder"),
        ({"tokenizer_config__json": '{"added_tokens_decoder": [1]}'}, r"added_tokens_decoder"),
        ({"tokenizer_config__json": '{"added_tokens_decoder": {"999": {"content": "y"}}}'}, r"'y' the id 999, .*91"),
        ({"chat_template__jinja": "{% for %}"}, r"chat_template\.jinja: the chat template"),
    ],
)
def test_checkpoint_is_bad_when_a_file_is(folder: Path, files: dict[str, str], message: str) -> None:
    write(folder, byte_level_backend(), **files)
    with pytest.raises(BadCheckpoint, match=message):
        load(folder)


def test_checkpoint_is_bad_when_the_folder_has_no_tokenizer(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(BadCheckpoint, match=r"has no tokenizer\.json"):
        load(folder)


def test_checkpoint_is_bad_when_the_decoder_is_of_another_kind(folder: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(BadCheckpoint, match="decoder is WordPiece"):
        load(write(folder, backend))
