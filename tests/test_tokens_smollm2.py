"""The real SmolLM2 vocabulary, out of its GGUF file, against transformers' tokenizer of the same file.

transformers 5 does not know the file's pre-tokenizer name (`smollm`) and cuts text as GPT-2 does, which differs where
digits follow white space. The oracle here gets the pre-tokenizer of the model's own tokenizer.json (single digits, then
byte level) and is otherwise transformers' own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.source import ModelSource
from nanoserve.tokens import StreamDecoder, Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

CORPUS = [
    "",
    " ",
    "The capital of France is Paris.",
    "  leading and trailing  \n\n\n",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # 12345\n\tif x != 3.14e-10:\n\t\tpass\n",
    "x = 10\n\n  20\t\t3  4\r\n5   66",
    "½ ² ٣٤ Ⅷ 第1章 1,234,567.89",
    "Zürich, naïve, Ελληνικά, русский, עברית, العربية, हिन्दी, 中文字符, 日本語, 한국어",
    "e\u0301 \u00e9 \ufb01 \u200b\u200d\ufeff",
    "👨‍👩‍👧‍👦😊🇫🇷 ✅",
    "\n\r\r\n\v\f\x1c\x85\u2028\u2029\x00\x7f \u3000\xa0",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|><repo_name>",
    "<|im_start |> <|im_end| > < |endoftext|>",
    "I'm you're they've we'll she'd IT'S can't",
    "a" * 3000,
    "word " * 500,
    '{"json": [1, 2.5, null, true], "s": "\\u00e9"}',
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1  2\n33"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "</s><|im_end|> é😊"},
    ],
]


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("gguf", smollm2_path, "smollm2-135m"))


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def known_bytes(ours: Tokenizer) -> set[int]:
    """The vocabulary has no token for 21 bytes that only rare characters need; those drop out of a text."""
    known = {raw[0] for raw in map(ours.token_bytes, range(ours.vocab_size)) if len(raw) == 1}
    assert len(known) == 256 - 21
    return known


def decoded(theirs: Any, ids: list[int]) -> str:
    text: str = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_ids_are_transformers_when_text_is_of_any_kind(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == decoded(theirs, ids)


@settings(max_examples=300)
@given(st.text() | st.text(alphabet="aA 1٣½\n\t.'é😊<|im_start|>"))
def test_ids_are_transformers_when_text_is_random(
    ours: Tokenizer, theirs: Any, known_bytes: set[int], text: str
) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    kept = bytes(byte for byte in text.encode() if byte in known_bytes)
    assert ours.decode(ours.encode(text, parse_special=False)) == kept.decode("utf-8", "replace")


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 49_151), max_size=20))
def test_text_is_transformers_and_the_streams_when_ids_are_random(ours: Tokenizer, theirs: Any, ids: list[int]) -> None:
    decoder = StreamDecoder(ours)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == ours.decode(ids) == decoded(theirs, ids)


def test_every_token_prints_what_transformers_prints(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 49_152
    printed = [ours.token_bytes(token_id).decode("utf-8", "replace") for token_id in range(ours.vocab_size)]
    assert printed == theirs.batch_decode(
        [[token_id] for token_id in range(ours.vocab_size)],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


@pytest.mark.parametrize("messages", CHATS, ids=["one turn", "system", "dialogue"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_transformers_when_rendered_and_encoded(
    ours: Tokenizer, theirs: Any, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    assert ours.render_chat(messages, **options) == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.encode_chat(messages, **options) == theirs.apply_chat_template(messages, **options)["input_ids"]


def test_chat_begins_with_one_marker_when_the_file_wants_no_bos(ours: Tokenizer) -> None:
    """The file names `<|im_start|>` as BOS and says not to add it; the template's own marker is the first token."""
    ids = ours.encode_chat(CHATS[0])
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, {2})
    assert ids[0] == 1
    assert ids[1] != 1
    assert ours.encode("hi")[0] != 1


def test_digits_are_cut_before_white_space_as_the_model_was_trained(ours: Tokenizer) -> None:
    """Two spaces before a digit are one token, since digits are cut off first."""
    assert ours.encode("  12") == [ours.encode("  ")[0], *ours.encode("1"), *ours.encode("2")]


@pytest.mark.parametrize("text", ["", "x", " " * 5000, "1" * 300, "hello world " * 50, "<|im_start|>" * 40, "é😊" * 99])
def test_fewest_tokens_is_a_lower_bound_without_encoding(ours: Tokenizer, text: str) -> None:
    assert ours.fewest_tokens(text) <= len(ours.encode(text))
    assert ours.fewest_tokens(text * 100) >= len(text)


def test_tokenizer_loads_within_a_quarter_of_a_second(smollm2_path: Path) -> None:
    """Processor time of the best of three, libraries imported: the machine may be busy with other tests."""
    source = ModelSource("gguf", smollm2_path, "smollm2-135m")
    spent = []
    for _ in range(3):
        began = time.process_time()
        load_tokenizer(source)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.25
