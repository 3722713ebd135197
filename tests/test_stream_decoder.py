"""StreamDecoder: pieces join to the whole text, characters stay whole, stop strings cut exactly."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.tokens import StreamDecoder
from tests.fakes import ByteTokenizer

EOS = ByteTokenizer.EOS


def run(tokenizer: ByteTokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], StreamDecoder]:
    """Every delta (the last is what `finish` released) of a sequence that ends as soon as a stop string is certain."""
    decoder = StreamDecoder(tokenizer, stops)
    deltas = []
    for token_id in ids:
        deltas.append(decoder.push(token_id))
        if decoder.stopped:
            break
    return [*deltas, decoder.finish()], decoder


def pieces(*texts: str | bytes, strips: bool = False) -> tuple[ByteTokenizer, list[int]]:
    """A tokenizer whose tokens are these texts, and their ids in order."""
    raw = tuple(text.encode() if isinstance(text, str) else text for text in texts)
    return ByteTokenizer(pieces=raw, strips_leading_space=strips), [258 + index for index in range(len(raw))]


def earliest_cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The oracle: the whole text is known, and ends before the earliest stop string in it."""
    starts = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


SMALL_ALPHABET = st.text(alphabet="abcé😊\n", max_size=24)
STOPS = st.lists(st.text(alphabet="abcé😊\n", min_size=1, max_size=5), max_size=4).map(tuple)


@st.composite
def split_bytes(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)), max_size=len(raw))))
    edges = [0, *cuts, len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


@given(st.data(), SMALL_ALPHABET, STOPS)
def test_deltas_join_to_the_text_before_the_earliest_stop_when_tokens_split_anywhere(
    data: st.DataObject, text: str, stops: tuple[str, ...]
) -> None:
    tokenizer, ids = pieces(*data.draw(split_bytes(text.encode())))
    deltas, decoder = run(tokenizer, ids, stops)
    assert ("".join(deltas), decoder.stopped) == earliest_cut(text, stops)


@given(st.data(), st.binary(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3).map(tuple))
def test_deltas_equal_the_replaced_whole_when_bytes_are_not_utf8(
    data: st.DataObject, raw: bytes, stops: tuple[str, ...]
) -> None:
    tokenizer, ids = pieces(*data.draw(split_bytes(raw)))
    deltas, decoder = run(tokenizer, ids, stops)
    assert ("".join(deltas), decoder.stopped) == earliest_cut(raw.decode("utf-8", "replace"), stops)


@given(st.lists(st.integers(0, 300), max_size=60), st.booleans())
def test_stream_equals_decode_when_any_ids_are_emitted(ids: list[int], strips: bool) -> None:
    tokenizer = ByteTokenizer(strips_leading_space=strips)
    deltas, _ = run(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(SMALL_ALPHABET, STOPS)
def test_exactly_the_open_beginning_of_a_stop_is_held_when_text_arrives(text: str, stops: tuple[str, ...]) -> None:
    """The oracle tries every suffix: the longest one with which a stop string begins is what may not be shown yet."""
    tokenizer, ids = pieces(*text)
    decoder = StreamDecoder(tokenizer, stops)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += decoder.push(token_id)
        if decoder.stopped:
            return
        pushed = text[:count]
        open_at = [at for at in range(count) if any(stop.startswith(pushed[at:]) for stop in stops)]
        assert shown == pushed[: min(open_at, default=count)]


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        (["AB", "C D", "EF", "G"], ("C DEF",), "AB"),
        (["AB", "C D", "EF", "G"], ("BC DEFG",), "A"),
        (["Paris is", " big"], ("Pari",), ""),
        (["in ", "Paris", "!"], ("Pari",), "in "),
        (["The answer"], ("The",), ""),
        (["one two", " three"], ("two th", "two t"), "one "),
        (["one two", " three"], ("two tx", "two thr"), "one "),
        (["ab", "cd", "ef"], ("cd", "abcdef"), ""),
        (["ab", "cd", "ex"], ("cd", "abcdef"), "ab"),
        (["Grüße", " an", " alle"], ("üße a",), "Gr"),
        (["aaab"], ("aab",), "a"),
        (["abab", "abc"], ("ababc",), "ab"),
        (["x\n", "\nHuman:"], ("\n\nHuman:", "\n\n"), "x"),
        (["one", "two"], ("", "wo"), "onet"),
    ],
)
def test_text_ends_before_the_earliest_stop_when_one_spans_tokens(
    tokens: list[str], stops: tuple[str, ...], expected: str
) -> None:
    tokenizer, ids = pieces(*tokens)
    deltas, decoder = run(tokenizer, ids, stops)
    assert decoder.stopped
    assert "".join(deltas) == expected


def test_stop_matches_when_it_is_a_multi_byte_character_split_over_tokens() -> None:
    deltas, decoder = run(ByteTokenizer(), list("so 한😊 not this".encode()), ("😊",))
    assert decoder.stopped
    assert "".join(deltas) == "so 한"


@pytest.mark.parametrize("end", ["max_tokens", "eos"])
def test_held_text_is_released_when_a_stop_begins_but_never_completes(end: str) -> None:
    ids = list(b"value = STO") + ([EOS] if end == "eos" else [])
    deltas, decoder = run(ByteTokenizer(), ids, ("STOP",))
    assert not decoder.stopped
    assert "".join(deltas) == "value = STO"
    assert deltas[-1] == "STO"


def test_held_text_is_released_when_the_stop_turns_out_different() -> None:
    tokenizer, ids = pieces("a\n", "\nb", "\n\n\n")
    deltas, decoder = run(tokenizer, ids, ("\n\n\n",))
    assert deltas == ["a", "\n\nb", "", ""]
    assert decoder.stopped


def test_stop_is_found_at_finish_when_an_earlier_open_match_never_completes() -> None:
    tokenizer, ids = pieces("ab", "cd")
    deltas, decoder = run(tokenizer, ids, ("cd", "abcdef"))
    assert "".join(deltas) == "ab"
    assert decoder.stopped


def test_stop_is_not_found_when_only_prompt_and_answer_together_hold_it() -> None:
    """The decoder never sees the prompt: an answer that begins with the second half of a stop string goes on."""
    tokenizer, ids = pieces("MAN", ": hi")
    deltas, decoder = run(tokenizer, ids, ("HUMAN:",))
    assert not decoder.stopped
    assert "".join(deltas) == "MAN: hi"


def test_tokens_print_nothing_when_the_sequence_has_stopped() -> None:
    decoder = StreamDecoder(ByteTokenizer(), ("b",))
    assert [decoder.push(token_id) for token_id in b"abc"] == ["a", "", ""]
    assert decoder.finish() == ""


@pytest.mark.parametrize("text", ["😊", "한", "👨‍👩‍👧‍👦", "a😊b", "\ufffd", "é\ufffdx"])
def test_characters_come_whole_when_each_byte_is_a_token(text: str) -> None:
    deltas, _ = run(ByteTokenizer(), list(text.encode()))
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)


@pytest.mark.parametrize("limit", range(1, 9))
def test_stream_equals_whole_when_max_tokens_cuts_inside_a_character(limit: int) -> None:
    ids = list("a😊한".encode())[:limit]
    deltas, _ = run(ByteTokenizer(), ids)
    assert "".join(deltas) == bytes(ids).decode("utf-8", "replace")
    assert "\ufffd" not in "".join(deltas[:-1])


def test_half_a_character_is_one_replacement_when_eos_comes_inside_it() -> None:
    deltas, _ = run(ByteTokenizer(), [0xF0, 0x9F, 0x98, EOS])
    assert deltas == ["", "", "", "", "\ufffd"]


def test_invalid_bytes_are_replaced_at_once_when_they_can_never_complete() -> None:
    deltas, _ = run(ByteTokenizer(), [0xFF, 0x41, 0xE2, 0x82, 0x42])
    assert deltas == ["\ufffd", "A", "", "", "\ufffdB", ""]


def test_stop_may_be_the_replacement_character_when_the_tail_is_cut() -> None:
    deltas, decoder = run(ByteTokenizer(), [0x41, 0xE2, 0x82], ("\ufffd",))
    assert "".join(deltas) == "A"
    assert decoder.stopped


def test_special_tokens_print_nothing_when_they_stand_inside_text_or_a_character() -> None:
    deltas, _ = run(ByteTokenizer(), [0x41, ByteTokenizer.BOS, 0xC3, EOS, 0xA9])
    assert "".join(deltas) == "Aé"


def test_line_separators_and_controls_survive_when_streamed() -> None:
    text = "\n\r\r\n\v\f\x1c\x85\u2028\u2029\x00\ufeff✅ \t"
    deltas, _ = run(ByteTokenizer(), list(text.encode()), ("never",))
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([" Hello", " you"], "Hello you"),
        (["  two"], " two"),
        (["", " a"], "a"),
        ([" ", " b"], " b"),
        (["x", " y"], "x y"),
    ],
)
def test_one_leading_space_goes_when_the_tokenizer_strips_it(tokens: list[str], expected: str) -> None:
    tokenizer, ids = pieces(*tokens, strips=True)
    deltas, _ = run(tokenizer, ids)
    assert "".join(deltas) == expected == tokenizer.decode(ids)


@pytest.mark.parametrize("tokens", [[" Paris", "."], ["  two"], ["", " a"]])
def test_leading_space_stays_when_the_answer_continues_a_text(tokens: list[str]) -> None:
    tokenizer, ids = pieces(*tokens, strips=True)
    decoder = StreamDecoder(tokenizer, continues_text=True)
    assert "".join(decoder.push(token_id) for token_id in ids) + decoder.finish() == "".join(tokens)


def test_finish_returns_nothing_when_called_again() -> None:
    decoder = StreamDecoder(ByteTokenizer(), ("ab",))
    decoder.push(ord("a"))
    decoder.push(0xE2)
    assert decoder.finish() == "a\ufffd"
    assert decoder.finish() == ""


def test_work_stays_linear_when_text_and_stops_are_self_similar() -> None:
    """10,000 pushes against stops of 2,000 characters: rescanning a 2,000-character tail each time takes minutes."""
    decoder = StreamDecoder(ByteTokenizer(), ("a" * 2000 + "b", "a" * 1999 + "c"))
    began = time.process_time()
    shown = "".join(decoder.push(ord("a")) for _ in range(10_000)) + decoder.finish()
    assert shown == "a" * 10_000
    assert time.process_time() - began < 2.0
