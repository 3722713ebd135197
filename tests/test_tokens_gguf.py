"""Tokenizers from GGUF metadata: the vocabulary's bytes, the special tokens, BOS, and loud failures."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.errors import BadCheckpoint, InvalidRequest, Unsupported
from nanoserve.tokens import StreamDecoder, Tokenizer
from nanoserve.tokens.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from nanoserve.tokens.pieces import byte_alphabet, spell_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIALS = ["<s>", "</s>", "<|eot|>", "<｜begin▁of▁sentence｜>"]
CHAT = "{{ bos_token }}{% for m in messages %}<|eot|>{{ m.role }}:{{ m.content }}{% endfor %}"


def byte_level(joins: tuple[str, ...] = ("Ġ Ġ", "h i", "Ġ hi"), **changes: Any) -> dict[str, Any]:
    """Ids 0–3 are special, 4–259 the bytes, then what merges give, last the printing `<think>`. None drops a key."""
    tokens = [*SPECIALS, *byte_alphabet(), *(join.replace(" ", "") for join in joins), "<think>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * 4 + [NORMAL] * (len(tokens) - 5) + [USER_DEFINED],
        "merges": list(joins),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return keyed(metadata | changes)


def sentencepiece(pieces: dict[str, float], **changes: Any) -> dict[str, Any]:
    """`<unk>`, `<s>`, `</s>`, the 256 byte tokens from id 3 on, then these pieces with their scores, last `<think>`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return keyed(metadata | changes)


def keyed(metadata: dict[str, Any]) -> dict[str, Any]:
    keyed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
    if "chat_template" in metadata:
        keyed["tokenizer.chat_template"] = keyed.pop("tokenizer.ggml.chat_template")
    return keyed


def load(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata, "model.gguf")


def spelled(tokenizer: Tokenizer, metadata: dict[str, Any], text: str, **options: Any) -> list[str]:
    return [metadata["tokenizer.ggml.tokens"][each] for each in tokenizer.encode(text, **options)]


PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "d": -5.0, "▁ab": -10.0, "ab": -11.0, "cd": -12.0, "bc": -13.0,
          "abc": -9.0, "abcd": -20.0, "▁▁": -8.0}  # fmt: skip


# --- text to ids and back ----------------------------------------------------------------------------------------


@given(st.text())
def test_byte_level_text_survives_when_encoded_and_decoded(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, parse_special=False)) == text


@given(st.text(alphabet=st.sampled_from("ab cd ▁é😊\n\x85\u2028\ufffd")))
def test_sentencepiece_text_survives_when_encoded_and_decoded(text: str) -> None:
    """A "▁" in a text is a space to SentencePiece, in its reference implementation too."""
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text, parse_special=False)) == text.replace("▁", " ")


@given(st.lists(st.integers(-1, 300)))
def test_stream_equals_decode_when_any_ids_are_emitted(ids: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        decoder = StreamDecoder(tokenizer)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids)


@given(st.text(alphabet="abcd ", max_size=14))
def test_sentencepiece_merges_the_best_scored_pair_first(text: str) -> None:
    """The oracle is the algorithm as published: join the neighbours whose union scores best, the leftmost of equals."""
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [(-PIECES[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in PIECES]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    metadata = sentencepiece(PIECES)
    assert spelled(SENTENCEPIECE, metadata, text, add_special_tokens=False) == parts


def test_sentencepiece_falls_back_to_bytes_when_no_piece_fits() -> None:
    metadata = sentencepiece(PIECES)
    assert spelled(load(metadata), metadata, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]


def test_every_byte_has_one_spelling_and_comes_back() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert [alphabet[character] for character in spell_bytes(bytes(range(256)))] == list(range(256))
    assert [BYTE_LEVEL.token_bytes(4 + index) for index in range(256)] == [bytes([b]) for b in alphabet.values()]
    assert [SENTENCEPIECE.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_token_prints_its_plain_text_when_the_vocabulary_did_not_spell_it_in_bytes() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][-1] = "é\u3000"
    tokenizer = load(metadata)
    last = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(last) == "é\u3000".encode()
    assert tokenizer.encode("xé\u3000", add_special_tokens=False)[-1] == last


@pytest.mark.parametrize("token_id", [-1, 10_000, 2**70])
def test_token_prints_nothing_when_its_id_is_outside_the_vocabulary(token_id: int) -> None:
    assert BYTE_LEVEL.token_bytes(token_id) == SENTENCEPIECE.token_bytes(token_id) == b""


@pytest.mark.parametrize(("add_space_prefix", "expected"), [(True, "ab"), (False, " ab"), (None, "ab")])
def test_leading_space_is_dropped_when_the_file_says_one_was_added(
    add_space_prefix: bool | None, expected: str
) -> None:
    metadata = sentencepiece(PIECES, add_space_prefix=add_space_prefix)
    assert load(metadata).decode([metadata["tokenizer.ggml.tokens"].index("▁ab")]) == expected


# --- special tokens ----------------------------------------------------------------------------------------------


def test_special_tokens_are_single_ids_and_print_nothing() -> None:
    text = "<s>hi<|eot|> <｜begin▁of▁sentence｜></s>"
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert [each for each in ids if each < 4] == [0, 2, 3, 1]
    assert all(BYTE_LEVEL.is_special(each) for each in range(4))
    assert BYTE_LEVEL.decode(ids) == "hi "


def test_special_tokens_are_plain_text_when_not_parsed() -> None:
    ids = BYTE_LEVEL.encode("<s>hi</s>", add_special_tokens=False, parse_special=False)
    assert min(ids) >= 4
    assert BYTE_LEVEL.decode(ids) == "<s>hi</s>"
    assert BYTE_LEVEL.encode("<s>", add_special_tokens=False) == [0]


@pytest.mark.parametrize("make", [lambda: BYTE_LEVEL, lambda: SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_user_defined_token_is_whole_and_prints_when_it_stands_in_text(make: Any) -> None:
    tokenizer: Tokenizer = make()
    last = tokenizer.vocab_size - 1
    assert last in tokenizer.encode("a<think>b")
    assert not tokenizer.is_special(last)
    assert tokenizer.token_bytes(last) == b"<think>"


def test_end_tokens_are_the_union_of_those_the_file_names() -> None:
    tokenizer = load(byte_level(eos_token_id=1, eot_token_id=2, eom_token_id=3))
    assert tokenizer.eos_token_ids == {1, 2, 3}
    assert load(byte_level(eos_token_id=None)).eos_token_ids == frozenset()


def test_named_end_token_prints_nothing_when_its_type_says_normal() -> None:
    tokenizer = load(byte_level(token_type=None))
    assert tokenizer.is_special(1)
    assert tokenizer.encode("</s>", add_special_tokens=False) == [1]
    assert tokenizer.decode([1]) == ""


# --- BOS and EOS -------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("metadata", "bos"),
    [
        (byte_level(), 0),
        (byte_level(add_bos_token=True), 1),
        (byte_level(pre="llama-bpe"), 1),
        (byte_level(pre="llama-bpe", add_bos_token=False), 0),
        (byte_level(add_bos_token=True, bos_token_id=None), 0),
        (sentencepiece(PIECES), 1),
        (sentencepiece(PIECES, add_bos_token=False), 0),
    ],
)
def test_raw_prompt_has_one_bos_when_the_model_wants_one(metadata: dict[str, Any], bos: int) -> None:
    tokenizer = load(metadata)
    ids = tokenizer.encode("hi")
    assert ids.count(tokenizer.bos_token_id) == bos == len(ids) - len(tokenizer.encode("hi", add_special_tokens=False))
    assert ids[:bos] == [tokenizer.bos_token_id] * bos
    assert tokenizer.encode("") == [tokenizer.bos_token_id] * bos
    if bos:
        assert tokenizer.encode("<s>hi").count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("prints_bos", [True, False])
@pytest.mark.parametrize("wants_bos", [True, False])
def test_chat_has_one_bos_when_the_model_wants_one_or_the_template_prints_it(wants_bos: bool, prints_bos: bool) -> None:
    template = CHAT if prints_bos else CHAT.removeprefix("{{ bos_token }}")
    ids = load(byte_level(add_bos_token=wants_bos, chat_template=template)).encode_chat(MESSAGES)
    assert ids.count(0) == (1 if wants_bos or prints_bos else 0)
    assert ids[: ids.count(0)] == [0] * ids.count(0)
    assert ids.count(2) == 1


def test_eos_follows_a_raw_prompt_when_the_file_says_so() -> None:
    tokenizer = load(byte_level(add_eos_token=True, chat_template=CHAT))
    assert tokenizer.encode("hi")[-1] == 1
    assert 1 not in tokenizer.encode_chat(MESSAGES)


def test_chat_is_unsupported_when_the_file_has_no_template() -> None:
    with pytest.raises(Unsupported, match="/v1/completions"):
        BYTE_LEVEL.encode_chat(MESSAGES)


def test_special_tokens_in_user_text_are_parsed_as_transformers_does() -> None:
    ids = load(byte_level(chat_template=CHAT)).encode_chat([{"role": "user", "content": "a</s>b"}])
    assert ids.count(1) == 1


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_request_is_invalid_when_text_has_a_lone_surrogate(text: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate, U\\+D"):
        BYTE_LEVEL.encode(text)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level(pre="klingon"), r"tokenizer\.ggml\.pre is 'klingon'; supported are .*smollm"),
        (byte_level(model="bert"), r"tokenizer\.ggml\.model is 'bert'"),
        (byte_level(model=None), r"tokenizer\.ggml\.model is ''"),
        (byte_level(tokens=None), r"tokenizer\.ggml\.tokens is missing"),
        (byte_level(tokens="abc"), r"tokenizer\.ggml\.tokens has the wrong type"),
        (byte_level(tokens=[1, 2]), r"tokenizer\.ggml\.tokens has the wrong type"),
        (byte_level(token_type=[1, 1]), r"token_type has 2 entries for 264 tokens"),
        (byte_level(bos_token_id=264), r"bos_token_id is 264; the vocabulary has the ids 0 to 263"),
        (byte_level(eos_token_id=-1), r"eos_token_id is -1"),
        (byte_level(eos_token_id="</s>"), r"eos_token_id is '</s>'"),
        (byte_level(merges=["hi"]), r"merges\[0\] is 'hi'"),
        (byte_level(merges=["h ü"]), r"merges do not fit the tokens"),
        (sentencepiece(PIECES, scores=[1.0]), r"scores has 1 entries"),
        (sentencepiece(PIECES, scores=None), r"neither tokenizer\.ggml\.scores nor"),
        (byte_level(chat_template="{% if %}"), r"the chat template cannot be compiled"),
    ],
)
def test_checkpoint_is_bad_when_the_metadata_is(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=rf"^model\.gguf: .*{message}"):
        load(metadata)


# --- how text is cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "x  1", ["x", "Ġ", "Ġ1"]),
        ("default", "x  1", ["x", "Ġ", "Ġ1"]),
        (None, "x  1", ["x", "Ġ", "Ġ1"]),
        ("smollm", "x  1", ["x", "ĠĠ", "1"]),
        ("smollm", "x 11", ["x", "Ġ", "1", "1"]),
        ("gpt-2", "x 11", ["x", "Ġ1", "1"]),
        ("llama-bpe", "1111", ["111", "1"]),
        ("qwen2", "1111", ["1", "1", "1", "1"]),
        ("tekken", "11", ["1", "1"]),
        ("qwen2", "e\u0301", ["é"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_does(pre: str | None, text: str, expected: list[str]) -> None:
    metadata = byte_level(("Ġ Ġ", "Ġ 1", "1 1", "11 1", "Ã ©"), pre=pre)
    got = spelled(load(metadata), metadata, text, add_special_tokens=False)
    assert got == [spell_bytes(each.encode()) if each == "é" else each for each in expected]


def test_split_patterns_are_those_transformers_reads_from_the_same_files() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as THEIRS

    ours = {name: pre.pattern for name, pre in PRE_TOKENIZERS.items() if pre.pattern is not None}
    assert ours == {name: THEIRS[name] for name in ours}


BYTE_LEVEL = load(byte_level())
SENTENCEPIECE = load(sentencepiece(PIECES))
