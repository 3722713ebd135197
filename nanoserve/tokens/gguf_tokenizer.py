"""Build a Tokenizer from a GGUF file's metadata.

The keys are GGUF's (`tokenizer.ggml.*`, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): `model` says which
algorithm reads the vocabulary, `pre` how text is cut before byte-level merges apply. A cut that is not in our table
would silently give other ids than the model was trained on, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.errors import BadCheckpoint
from nanoserve.tokens.chat import ChatTemplate
from nanoserve.tokens.pieces import TokenPieces, is_byte_spelled, spell_bytes
from nanoserve.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_AND_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merges apply.

    pattern        the cut's regular expression; None is GPT-2's own
    single_digits  digits are cut one by one first
    nfc            text is composed (Unicode NFC) first
    whole_words    a cut that is a token is taken as it is, merges or not
    adds_bos       whether a file that does not say wants BOS
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder"), PreTokenizer(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Raises BadCheckpoint, naming `origin` and the key, for what is missing, malformed or not supported."""
    vocabulary = _Vocabulary(metadata, origin)
    model = vocabulary.text("model")
    if model == "gpt2":
        backend, adds_bos = _byte_level_backend(vocabulary)
        strips_leading_space = False
    elif model == "llama":
        strips_leading_space = vocabulary.flag("add_space_prefix", True)
        backend, adds_bos = _sentencepiece_backend(vocabulary, strips_leading_space), True
    else:
        raise BadCheckpoint(
            f"{origin}: tokenizer.ggml.model is {model!r}; 'gpt2' and 'llama' are supported: "
            "use the model's safetensors folder, with its tokenizer.json"
        )
    bos, eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
    names = {"bos_token": bos, "eos_token": eos, "unk_token": vocabulary.special_id("unknown")}
    names["pad_token"] = vocabulary.special_id("padding")
    template = metadata.get("tokenizer.chat_template")
    variables = {name: vocabulary.tokens[token_id] for name, token_id in names.items() if token_id is not None}
    ends = (eos, vocabulary.special_id("eot"), vocabulary.special_id("eom"))
    tokens = vocabulary.tokens
    return Tokenizer(
        backend,
        TokenPieces(
            "byte_level" if model == "gpt2" else "sentencepiece",
            lambda token_id: tokens[token_id] if 0 <= token_id < len(tokens) else None,
            special_ids=vocabulary.special_ids,
            added_ids=vocabulary.user_defined_ids,
        ),
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        prefix_ids=(bos,) if bos is not None and vocabulary.flag("add_bos_token", adds_bos) else (),
        suffix_ids=(eos,) if eos is not None and vocabulary.flag("add_eos_token", False) else (),
        strips_leading_space=strips_leading_space,
        chat_template=ChatTemplate(template, variables=variables, origin=origin) if isinstance(template, str) else None,
    )


class _Vocabulary:
    """The `tokenizer.ggml.*` keys, checked as they are read.

    special_ids       control tokens, unknown, and whatever the file names as an end, a beginning or padding
    user_defined_ids  tokens that are found whole in a text and print
    """

    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self._metadata = metadata
        self.origin = origin
        self.tokens: tuple[str, ...] = tuple(self._array("tokens", str))
        if not self.tokens:
            raise BadCheckpoint(f"{origin}: tokenizer.ggml.tokens is missing or empty; the file holds no vocabulary")
        types: list[int] = self._array("token_type", int) or [_NORMAL] * len(self.tokens)
        self.scores: list[float] = self._array("scores", (int, float))
        self.merges: list[str] = self._array("merges", str)
        for key, values in (("token_type", types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise BadCheckpoint(
                    f"{origin}: tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens"
                )
        named = (self.special_id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
        control = [token_id for token_id, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)]
        self.special_ids = frozenset(control) | {token_id for token_id in named if token_id is not None}
        self.user_defined_ids = frozenset(token_id for token_id, kind in enumerate(types) if kind == _USER_DEFINED)
        self.normal_ids = [token_id for token_id, kind in enumerate(types) if kind == _NORMAL]

    def _array(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
            raise BadCheckpoint(f"{self.origin}: tokenizer.ggml.{key} has the wrong type")
        return values

    def text(self, key: str, default: str = "") -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        return value if isinstance(value, str) else repr(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{key}", default))

    def special_id(self, name: str) -> int | None:
        """The id in `tokenizer.ggml.<name>_token_id`, or None where the file names none."""
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise BadCheckpoint(
                f"{self.origin}: tokenizer.ggml.{name}_token_id is {token_id!r}; "
                f"the vocabulary has the ids 0 to {len(self.tokens) - 1}"
            )
        return token_id

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens that are found whole in a text, in id order: special ones, and user-defined ones, which print."""
        from tokenizers import AddedToken

        whole = sorted(self.special_ids | self.user_defined_ids)
        return [AddedToken(self.tokens[each], normalized=False, special=each in self.special_ids) for each in whole]

    def merge_pairs(self) -> list[tuple[str, str]]:
        pairs = []
        for index, merge in enumerate(self.merges):
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise BadCheckpoint(f"{self.origin}: tokenizer.ggml.merges[{index}] is {merge!r}; it needs two parts")
            pairs.append((left, right))
        return pairs


def _byte_level_backend(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """(the encoder, whether the model wants BOS unless the file says otherwise)."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    name = vocabulary.text("pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise BadCheckpoint(
            f"{vocabulary.origin}: tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}: "
            "use the model's safetensors folder, with its tokenizer.json"
        )
    verbatim = vocabulary.special_ids | vocabulary.user_defined_ids
    ids = {
        token if token_id in verbatim or is_byte_spelled(token) else spell_bytes(token.encode()): token_id
        for token_id, token in enumerate(vocabulary.tokens)
    }
    backend = Tokenizer(_bpe(vocabulary, ids, vocabulary.merge_pairs(), ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    if pre.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.add_tokens(vocabulary.added_tokens())
    return backend, pre.adds_bos


def _sentencepiece_backend(vocabulary: _Vocabulary, add_space_prefix: bool) -> tokenizers.Tokenizer:
    """SentencePiece BPE as merges; each stretch of text between special tokens begins with a space of its own, as in
    the files' reference implementation."""
    from tokenizers import Tokenizer, normalizers

    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = vocabulary.merge_pairs() or _merges_from_scores(vocabulary, ids)
    unknown = vocabulary.special_id("unknown")
    unk_token = None if unknown is None else vocabulary.tokens[unknown]
    backend = Tokenizer(_bpe(vocabulary, ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space_prefix else spaces
    backend.add_tokens(vocabulary.added_tokens())
    return backend


def _bpe(vocabulary: _Vocabulary, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import models

    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # The library raises a bare Exception: a merge whose parts or result are no tokens.
        raise BadCheckpoint(f"{vocabulary.origin}: tokenizer.ggml.merges do not fit the tokens: {error}") from error


def _merges_from_scores(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges a scored vocabulary implies: every way to make a token of two, the best-scored token first, and of one
    token's ways the longest left part first."""
    if not vocabulary.scores:
        raise BadCheckpoint(f"{vocabulary.origin}: neither tokenizer.ggml.scores nor tokenizer.ggml.merges is present")
    ranked = []
    for token_id in vocabulary.normal_ids:
        token, score = vocabulary.tokens[token_id], vocabulary.scores[token_id]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]
