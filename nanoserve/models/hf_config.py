"""`ModelConfig` from a Hugging Face folder: config.json and, where there is one, generation_config.json.

Absent fields take the family's defaults in transformers 5. A field that would change the computation and that
the decoder does not honour is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.errors import BadCheckpoint
from nanoserve.models.config import DTYPES, DTypeName, ModelConfig, RopeConfig, SamplingDefaults, validated
from nanoserve.models.fields import Fields
from nanoserve.source import read_json, read_safetensors_header, weight_files

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPE_OF_TENSOR: dict[str, DTypeName] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` leaves unsaid. `kv_heads` None: as many as attention heads."""

    architecture: str
    kv_heads: int | None
    head_dim: int | None
    max_positions: int
    sliding_window: int | None
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", None, None, 2048, None),
    "mistral": _Family("MistralForCausalLM", 8, None, 131_072, 4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32, None, 32_768, 4096),
    "qwen3": _Family("Qwen3ForCausalLM", 32, 128, 32_768, 4096, qk_norm=True),
}


def read_hf_config(folder: Path) -> ModelConfig:
    """Build and validate the config of a safetensors folder. Raises BadCheckpoint."""
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    family = _family(fields)
    generation_path = folder / "generation_config.json"
    generation = Fields(read_json(generation_path) if generation_path.exists() else {}, str(generation_path))
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    head_dim = fields.optional_integer("head_dim") or family.head_dim
    if head_dim is None and hidden % heads:
        fields.refuse("hidden_size", f"without head_dim it must be a multiple of num_attention_heads, {heads}")
    model_type = fields.text("model_type", "")
    attention_bias = fields.flag("attention_bias", False) if model_type in ("llama", "qwen3") else False
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(fields, family, heads),
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_positions),
        windows=_windows(fields, model_type, family, layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias or model_type == "qwen2",
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if model_type == "llama" else False,
        qk_norm=family.qk_norm,
        eos_token_ids=tuple(sorted(fields.token_ids("eos_token_id") | generation.token_ids("eos_token_id"))),
        bos_token_id=fields.optional_integer("bos_token_id", low=0),
        dtype=_dtype(fields, folder),
        sampling=_sampling(generation),
    )
    return validated(config, str(path))


def _family(fields: Fields) -> _Family:
    model_type = fields.text("model_type", "")
    family = _FAMILIES.get(model_type)
    if family is None:
        fields.refuse("model_type", f"supported are {', '.join(_FAMILIES)}")
    architectures = fields.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        fields.refuse("architectures", f"model_type {model_type} is supported as [{family.architecture!r}]")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "supported is silu")
    if fields.get("quantization_config") is not None:
        fields.refuse("quantization_config", "quantised safetensors are not supported; use the original or a GGUF")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", "supported is 1.0")
    return family


def _kv_heads(fields: Fields, family: _Family, heads: int) -> int:
    # An explicit null means multi-head attention; an absent field means the family's default.
    default = heads if "num_key_value_heads" in fields.values or family.kv_heads is None else family.kv_heads
    return fields.integer("num_key_value_heads", default)


def _windows(fields: Fields, model_type: str, family: _Family, layers: int) -> tuple[int | None, ...]:
    if model_type == "llama":
        return (None,) * layers
    given = "sliding_window" in fields.values
    window = fields.optional_integer("sliding_window") if given else family.sliding_window
    if model_type == "mistral":
        if fields.get("layer_types") is not None:
            fields.refuse("layer_types", "mistral has one sliding_window for all layers")
        return (window,) * layers
    if not fields.flag("use_sliding_window", False):
        window = None
    kinds: Any = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or not set(kinds) <= {"full_attention", "sliding_attention"}:
        fields.refuse("layer_types", "supported are full_attention and sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` stood alone and `rope_scaling` beside it."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.get(name)
    if scaling is not None and not isinstance(scaling, dict):
        fields.refuse(name, "an object is needed")
    rope = Fields(scaling or {}, f"{fields.where}: {name}")
    type_field = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = rope.text(type_field, "default")
    if rope_type not in _ROPE_TYPES:
        rope.refuse(type_field, f"supported are {', '.join(_ROPE_TYPES)}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "supported is 1.0")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    original = rope.integer("original_max_position_embeddings", max_positions)
    original = fields.integer("original_max_position_embeddings", original)
    if rope_type == "yarn" and rope.get("factor") is None:
        factor = max_positions / original
    else:
        factor = _required(rope, "factor")
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor)
    if rope_type == "llama3":
        low, high = _required(rope, "low_freq_factor"), _required(rope, "high_freq_factor")
        if not 0 < low < high:
            rope.refuse("high_freq_factor", f"it must be above low_freq_factor, {low}, and both above 0")
        return RopeConfig("llama3", theta, factor, original, low, high)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _required(fields: Fields, field: str) -> float:
    value = fields.optional_number(field)
    if value is None:
        raise BadCheckpoint(f"{fields.where}: {field} is missing")
    return value


def _dtype(fields: Fields, folder: Path) -> DTypeName:
    """The config's word (`dtype`, before transformers 5 `torch_dtype`), else the first weight's own."""
    field = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.text(field, "").removeprefix("torch.")
    if not name or name == "auto":
        entries = read_safetensors_header(weight_files(folder)[0])
        found = {_DTYPE_OF_TENSOR[entry.dtype] for entry in entries.values() if entry.dtype in _DTYPE_OF_TENSOR}
        return found.pop() if len(found) == 1 else "float32"
    for known in DTYPES:
        if name == known:
            return known
    fields.refuse(field, f"supported are {', '.join(DTYPES)}")


def _sampling(generation: Fields) -> SamplingDefaults:
    if not generation.flag("do_sample", False):
        return SamplingDefaults()
    sampling = SamplingDefaults(
        temperature=generation.optional_number("temperature"),
        top_k=generation.optional_integer("top_k", low=0),
        top_p=generation.optional_number("top_p"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
    )
    if sampling.temperature is not None and sampling.temperature < 0:
        generation.refuse("temperature", "it must not be below 0")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        generation.refuse("top_p", "it must be above 0 and at most 1")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        generation.refuse("min_p", "it must lie between 0 and 1")
    if sampling.repetition_penalty is not None and not sampling.repetition_penalty > 0:
        generation.refuse("repetition_penalty", "it must be above 0")
    return sampling
