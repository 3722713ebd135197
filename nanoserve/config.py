"""What the operator decided, frozen. Values derived from it (the pool, the plans) are new objects elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoserve.errors import ConfigError

AttentionRead = Literal["auto", "rectangle", "paged"]
Quantise = Literal["none", "w8", "w4"]
QuantiseHead = Literal["auto", "w8", "w4"]
Kernels = Literal["auto", "reference", "native"]
GraphBackend = Literal["auto", "eager", "cuda"]
STEP_ROWS = 512
"""Rows of a step by default: from here on more rows make a step longer and hardly make better use of the weights."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `build_engine` needs. Sizes of 0 or None mean "decide from the model and the machine".

    model              a folder, a .gguf file, a hub id or a short name (`source.resolve`)
    dtype              auto (fp32 on the CPU reference kernels, the checkpoint's own on an accelerator), or a name
    quantize           none, or what float matrices become at load: w8 or w4, groups of 32 (`models.quantise`)
    quantize_head      what the output head becomes, whatever it is stored as; auto: 8 bits where `quantize` is given
    device             auto, cpu, cuda, cuda:0 …
    max_model_len      most tokens of prompt and answer together; None: the smaller of the model's and 2,048
    max_sequences      table rows: sequences that run at once; None: 8 in the rectangle read, 32 in the paged read
    kernels            auto: native on a CPU where they can be built, else reference
    attention_read     auto: paged on the native kernels, else rectangle
    block_size         slots per block
    width_multiple     rectangle widths are multiples of this (tokens)
    max_step_rows      rows of a step, one for each decoding sequence and each prompt token (the token budget); None:
                       512, or twice max_sequences if that is more
    prefill_gap_seconds  what prompts may add to the time between two tokens of a running stream, where decoding itself
                       does not take longer
    prefix_cache       share blocks between sequences that start with the same tokens, and keep them as long as there is
                       room
    prefault           touch the whole K/V pool at boot; off: its memory is taken as tokens fill it
    kv_memory_bytes    size of the K/V pool; None: `kv_memory_share` of the memory that is free after the weights
    bucket_decode      pad decode batches to a closed set of shapes; off: every batch keeps its own size
    persist_inputs     write step inputs into buffers that keep their address; required by capture_decode
    capture_decode     record and replay decode graphs
    warm_rows, warm_width  trim the warm list on either axis; None: all the scheduler can present
    warmup_seconds     stop warming when the plan has cost this much; None: no limit, 0: warm nothing
    self_test_seconds  how long the padding self-test at the end of the warm-up may take; 0: no test
    warm_list          file holding the shapes served last time; warmed first, saved at shutdown
    strict_shapes      an uncovered shape is a start-up error, and a later miss a failure
    paranoid           run the per-step gates and the integrity check after every step
    max_queued         waiting sequences beyond which a submit is refused
    max_queued_tokens  waiting prompt tokens beyond which a submit is refused, unless nobody waits; None: no limit
    request_timeout_seconds  how long a request that names no timeout may take, waiting included; None: no limit
    threads            compute threads; None: one per core
    """

    model: str = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantize: Quantise = "none"
    quantize_head: QuantiseHead = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_sequences: int | None = None
    block_size: int = 16
    width_multiple: int = 128
    max_step_rows: int | None = None
    prefill_gap_seconds: float = 0.05
    prefix_cache: bool = True
    kv_memory_bytes: int | None = None
    kv_memory_share: float = 0.5
    prefault: bool = False
    attention_read: AttentionRead = "auto"
    kernels: Kernels = "auto"
    graph_backend: GraphBackend = "auto"
    bucket_decode: bool = True
    persist_inputs: bool = True
    capture_decode: bool = True
    warm_rows: int | None = None
    warm_width: int | None = None
    warmup_seconds: float | None = None
    self_test_seconds: float = 1.0
    warm_list: str | None = None
    strict_shapes: bool = False
    paranoid: bool = False
    max_queued: int = 1024
    max_queued_tokens: int | None = None
    request_timeout_seconds: float | None = None
    threads: int | None = None

    @property
    def sequences(self) -> int:
        """`max_sequences`, once it has been chosen."""
        assert self.max_sequences is not None, "max_sequences is still open"
        return self.max_sequences

    @property
    def step_rows(self) -> int:
        """`max_step_rows`, once it has been chosen."""
        assert self.max_step_rows is not None, "max_step_rows is still open"
        return self.max_step_rows


def choose_step_rows(wanted: int | None, sequences: int) -> int:
    """`max_step_rows` for so many sequences, if it is still open. Raises ConfigError if they could not all decode."""
    rows = wanted or max(STEP_ROWS, 2 * sequences)
    if rows < sequences:
        raise ConfigError(
            f"--max-step-rows is {rows}; {sequences} sequences may decode in one step, a row each; "
            f"raise it to at least {sequences}, or lower --max-sequences"
        )
    return rows
