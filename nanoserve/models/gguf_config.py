"""`ModelConfig` from a GGUF header, for the architectures llama (Mistral ships as llama too), qwen2 and qwen3."""

from __future__ import annotations

import numpy as np

from nanoserve.errors import BadCheckpoint
from nanoserve.gguf_file import GGUFFile
from nanoserve.models.config import DTypeName, ModelConfig, RopeConfig, RopeType, SamplingDefaults, validated
from nanoserve.models.fields import Fields

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_TYPES: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}
_FLOAT_TYPES: dict[str, DTypeName] = {"F16": "float16", "BF16": "bfloat16"}
# Keys that change the computation, with the only value the decoder honours.
_FIXED = {
    "expert_count": 0,
    "attention.scale": 0,
    "attention.causal": True,
    "attention.sliding_window_pattern": None,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
    "embedding_scale": 0,
    "residual_scale": 0,
    "logit_scale": 0,
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The config of an open file; biases, the tied head and the vocabulary's size are read off its tensors.

    Raises BadCheckpoint.
    """
    where = str(file.path)
    general = Fields(file.metadata, where, "general.")
    name = general.text("architecture", "")
    if name not in _ARCHITECTURES:
        general.refuse("architecture", f"supported are {', '.join(_ARCHITECTURES)}")
    if Fields(file.metadata, where, "split.").integer("count", 1, low=0) > 1:
        raise BadCheckpoint(f"{where}: it is one part of a split model; join it first (llama-gguf-split --merge)")
    fields = Fields(file.metadata, where, f"{name}.")
    for key, only in _FIXED.items():
        if fields.get(key) not in (None, only):
            fields.refuse(key, "a model that needs this key is not supported")
    layers, hidden = fields.integer("block_count"), fields.integer("embedding_length")
    heads = _uniform(fields, "attention.head_count", None)
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            fields.refuse(key, f"supported is the head's size, {head_dim}")
    window = fields.optional_integer("attention.sliding_window", low=0) or None
    if name != "llama":
        window = None  # Qwen's window needs a per-layer rule that GGUF has no key for; its converter writes none
    tokenizer = Fields(file.metadata, where, "tokenizer.ggml.")
    config = ModelConfig(
        architecture=_ARCHITECTURES[name],
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=_uniform(fields, "feed_forward_length", None),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_uniform(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0),
        rope=_rope(fields, file),
        windows=(window,) * layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=name == "qwen3",
        eos_token_ids=tuple(sorted(set().union(*(tokenizer.token_ids(key) for key in _STOP_KEYS)))),
        bos_token_id=tokenizer.optional_integer("bos_token_id", low=0),
        dtype=_dtype(file),
        sampling=SamplingDefaults(),
    )
    return validated(config, where)


def _uniform(fields: Fields, key: str, default: int | None) -> int:
    """An integer some converters write once per layer."""
    value = fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            fields.refuse(key, "layers that differ are not supported")
        return Fields({key: value[0]}, fields.where).integer(key)
    return fields.integer(key) if default is None else fields.integer(key, default)


def _vocab_size(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        found = "missing" if table is None else f"of shape {list(table.shape)}"
        raise BadCheckpoint(f"{file.path}: tensor 'token_embd.weight' is {found}; [vocab, hidden] is needed")
    return table.shape[0]


def _rope(fields: Fields, file: GGUFFile) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    divisors = _frequency_divisors(file)
    rope_type = _ROPE_TYPES.get(fields.text("rope.scaling.type", "none"))
    if rope_type is None:
        fields.refuse("rope.scaling.type", f"supported are {', '.join(_ROPE_TYPES)}")
    if rope_type == "default":
        return RopeConfig("default", theta, frequency_divisors=divisors)
    factor = fields.number("rope.scaling.factor", 1.0)
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor, frequency_divisors=divisors)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        fields.integer("rope.scaling.original_context_length", fields.integer("context_length")),
        attention_factor=fields.optional_number("rope.scaling.yarn_attn_factor"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        frequency_divisors=divisors,
    )


def _frequency_divisors(file: GGUFFile) -> tuple[float, ...] | None:
    """`rope_freqs.weight`: the reference converter works llama3 scaling out into one divisor per frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type_name != "F32":
        raise BadCheckpoint(f"{file.path}: tensor 'rope_freqs.weight' is {tensor.type_name}; F32 is needed")
    values = file.raw(tensor.name).view(np.float32)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise BadCheckpoint(f"{file.path}: tensor 'rope_freqs.weight' holds divisors that are not above 0")
    return tuple(float(value) for value in values)


def _dtype(file: GGUFFile) -> DTypeName:
    """The matrices' own type where all have the same float type, else float32 (norms are F32 in every file)."""
    kinds = {tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _FLOAT_TYPES.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
