"""The tokenizer the engine uses, whatever file it came from.

Owns which special ids frame a prompt. How files become a Tokenizer is `folder_tokenizer` and `gguf_tokenizer`; how ids
become text as they arrive is `stream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanoserve.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    import tokenizers

    from nanoserve.tokens.chat import ChatTemplate
    from nanoserve.tokens.pieces import TokenPieces


class Tokenizer:
    """Immutable; safe to use from several threads.

    backend        encodes text; its own post-processor is never used
    pieces         id → bytes
    prefix_ids     what the model wants before a raw prompt, as a rule BOS or nothing; suffix_ids after one
    eos_token_ids  the end-of-sequence ids the tokenizer's own files name
    strips_leading_space  an answer's text begins after the space its first token carries (SentencePiece)
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: TokenPieces,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        strips_leading_space: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._chat_template = chat_template
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.strips_leading_space = strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        With `add_special_tokens`, framed as the model wants a raw prompt; a BOS that the text already begins with is
        not doubled. With `parse_special`, the spelling of a special token in the text is that token, as in
        transformers; without, it is ordinary text. Raises InvalidRequest for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; "
                "send valid Unicode"
            ) from error
        backend = self._backend if parse_special else self._plain_backend
        # The batch call, unlike `encode`, lets go of the GIL; a long text takes seconds.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        prefix = self._prefix_ids
        return ids + self._suffix_ids if ids[: len(prefix)] == prefix else prefix + ids + self._suffix_ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered conversation, with exactly one BOS where the model wants one, whether or not the
        template prints it. Raises as `render_chat` does.

        Special tokens spelled out in a message's content become those tokens, as in transformers: the template's
        own markers and the user's text are one string by then.
        """
        return self.encode_rendered(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what `render_chat` returned."""
        ids = self.encode(text, add_special_tokens=False)
        prefix = self._prefix_ids
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as prompt text. Raises InvalidRequest if the messages do not fit the template, Unsupported
        if the model has no template."""
        if self._chat_template is None:
            raise Unsupported(
                "the model has no chat template; send a written-out prompt to /v1/completions", param="messages"
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what the token prints: nothing for a special token or an id past the vocabulary."""
        return self._pieces.token_bytes(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text at once: what a StreamDecoder without stops yields in total."""
        raw = b"".join(map(self._pieces.token_bytes, token_ids))
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode("utf-8", "replace")

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`, without encoding it: 0 where the tokenizer may drop or merge text."""
        if self._pieces.spelling != "byte_level" or self._backend.normalizer is not None:
            return 0
        return len(text) // self._longest_token_bytes

    @cached_property
    def _longest_token_bytes(self) -> int:
        """Most bytes of text that one token stands for; a special token stands for its spelling."""
        spelled = (self.token_bytes(i) or (self._pieces.token_of(i) or "").encode() for i in range(self.vocab_size))
        return max(1, *map(len, spelled))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._pieces.special_ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # The switch is a property of the whole backend, so text that must not be parsed takes one of its own.
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend
