"""What the decoder must know of a model, whatever file it came from: `ModelConfig`, frozen and validated.

Field names are Hugging Face's where one exists. `hf_config` and `gguf_config` build it, `load_config`
picks the builder. No torch: the server reads a config before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoserve.errors import BadCheckpoint
from nanoserve.source import ModelSource

RopeType = Literal["default", "linear", "llama3", "yarn"]
DTypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position parameters, as Hugging Face's `rope_parameters` names them; None where the type has no use
    for one.

    `original_max_position_embeddings` is the context the model was trained at (llama3, yarn). `frequency_divisors`
    holds GGUF's `rope_freqs.weight`, one per frequency: llama3 scaling as that format stores it, already worked out.
    """

    rope_type: RopeType = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json asks for when a request does not say; None: it does not say either."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family.

    windows                 per layer: tokens a query sees, its own included; None is the whole context
    attention_bias          biases on q, k and v; `attention_output_bias` is the one on o
    qk_norm                 RMS norm over each head of q and k, before the rotation (Qwen3)
    eos_token_ids           every id that ends a generation, ascending
    dtype                   what `dtype="auto"` loads; float32 where the checkpoint is quantised
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: DTypeName
    sampling: SamplingDefaults

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V one token takes over all layers, at `itemsize` bytes a number."""
        return 2 * self.num_hidden_layers * self.kv_size * itemsize


def load_config(source: ModelSource) -> ModelConfig:
    """The model's config from config.json or the GGUF header. Raises BadCheckpoint naming file, field and value."""
    if source.kind == "gguf":
        from nanoserve.models.gguf_config import gguf_config

        return gguf_config(source.gguf)
    from nanoserve.models.hf_config import read_hf_config

    return read_hf_config(source.path)


def validated(config: ModelConfig, where: str) -> ModelConfig:
    """The config itself, or BadCheckpoint naming `where` (the file) and the field that cannot be."""

    def refuse(field: str, value: object, needed: str) -> None:
        raise BadCheckpoint(f"{where}: {field} is {value}; {needed}")

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        refuse("num_attention_heads", heads, f"it must be a multiple of num_key_value_heads, {kv_heads}")
    if config.head_dim % 2:
        refuse("head_dim", config.head_dim, "rotary embeddings need an even one")
    if not 0 < config.rms_norm_eps < 1:
        refuse("rms_norm_eps", config.rms_norm_eps, "it must lie between 0 and 1")
    if len(config.windows) != config.num_hidden_layers:
        refuse("layer_types", f"{len(config.windows)} long", f"there are {config.num_hidden_layers} layers")
    for window in config.windows:
        if window is not None and window < 1:
            refuse("sliding_window", window, "it must be at least 1 token")
    for token in config.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            refuse("eos_token_id", token, f"the vocabulary has {config.vocab_size} tokens")
    rope, half = config.rope, config.head_dim // 2
    if not rope.rope_theta > 1:
        refuse("rope_theta", rope.rope_theta, "it must be above 1")
    if not rope.factor > 0:
        refuse("rope_parameters.factor", rope.factor, "it must be above 0")
    if rope.frequency_divisors is not None and len(rope.frequency_divisors) != half:
        refuse("tensor 'rope_freqs.weight'", f"{len(rope.frequency_divisors)} long", f"head_dim / 2 is {half}")
    return config
