"""What `auto` means on this machine: every choice a config leaves open, made once, before anything is loaded."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from nanoserve.backends import CudaBackend, EagerBackend
from nanoserve.config import EngineConfig, choose_step_rows
from nanoserve.errors import ConfigError, KernelBuildError
from nanoserve.graphs import GraphBackend
from nanoserve.models.config import ModelConfig
from nanoserve.models.quantise import Quantise

if TYPE_CHECKING:
    from nanoserve.kernels.native_lib import NativeLibrary

log = logging.getLogger("nanoserve")
MAX_COUNT = 2**31 - 1
COUNTS = {
    "max_sequences": 1 << 16,
    "block_size": 1 << 16,
    "width_multiple": 1 << 20,
    "max_step_rows": 1 << 20,
    "max_queued": MAX_COUNT,
    "max_queued_tokens": MAX_COUNT,
    "warm_rows": MAX_COUNT,
    "warm_width": MAX_COUNT,
    "threads": 1024,  # OpenMP ends the process when the system has no thread left to give
}
"""The highest value of each flag that counts; the lowest is 1. Above it lies a typing error, not a deployment."""
NATIVE_BLOCK, NATIVE_LANES, NATIVE_MAX_HEAD_DIM = 16, 16, 256
RECTANGLE_SEQUENCES, PAGED_SEQUENCES = 8, 32
"""How many sequences run at once by default: a rectangle pays for every row at every width, a paged step only for what
there is."""


@dataclass(frozen=True, slots=True)
class Choices:
    """config has no field left open; `library` holds the native kernels where those were chosen."""

    config: EngineConfig
    device: torch.device
    library: NativeLibrary | None

    @property
    def kernels(self) -> str:
        """`reference`, or the native path's instruction set, as the boot line and /health name it."""
        return f"native ({self.library.isa})" if self.library is not None else "reference"


def choose(config: EngineConfig, model: ModelConfig | None = None) -> Choices:
    """Raises ConfigError for flags that contradict each other or ask for what is not here."""
    check_config(config)
    device = pick_device(config.device)
    library = pick_library(config, device, model)
    read: Literal["rectangle", "paged"] = "paged" if library is not None else "rectangle"
    if config.attention_read != "auto":
        read = config.attention_read
    if read == "paged" and library is None and device.type == "cuda":
        raise ConfigError("the paged read has no kernel that a CUDA graph can hold; drop --attention-read paged")
    sequences = config.max_sequences or (PAGED_SEQUENCES if read == "paged" else RECTANGLE_SEQUENCES)
    rows = choose_step_rows(config.max_step_rows, sequences)
    chosen = replace(config, attention_read=read, max_sequences=sequences, max_step_rows=rows)
    return Choices(chosen, device, library)


def check_config(config: EngineConfig) -> None:
    """Raises ConfigError for flags outside their range or that contradict each other."""
    for name, limit in COUNTS.items():
        value = getattr(config, name)
        if value is not None and not 1 <= value <= limit:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be from 1 to {limit:,}")
    for name in ("warmup_seconds", "self_test_seconds", "prefill_gap_seconds"):
        value = getattr(config, name)
        if value is not None and not value >= 0.0:  # NaN is refused too
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number of seconds, at least 0")
    if config.request_timeout_seconds is not None and not 0.0 < config.request_timeout_seconds < math.inf:
        raise ConfigError(
            f"--request-timeout is {config.request_timeout_seconds}; it must be a number of seconds above 0; "
            "leave it out for no limit"
        )
    if config.max_model_len is not None and config.max_model_len < 2:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; a prompt and an answer need at least 2 tokens")
    if config.capture_decode and not (config.bucket_decode and config.persist_inputs):
        raise ConfigError(
            "recording decode graphs needs a closed set of shapes and buffers that keep their address; "
            "add --no-capture-decode, or drop --no-bucket-decode and --no-persist-inputs"
        )
    if config.attention_read == "paged" and not config.capture_decode:
        raise ConfigError("--attention-read paged replays every step; drop --no-capture-decode, or read the rectangle")
    if config.kernels == "native" and config.attention_read == "rectangle":
        raise ConfigError("the native kernels read pages; drop --attention-read rectangle or --kernels native")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: there are no kernels for {device.type}; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: no CUDA device here, or none that torch can use; use --device cpu")
    return device


def pick_library(config: EngineConfig, device: torch.device, model: ModelConfig | None) -> NativeLibrary | None:
    """The native kernels if they are wanted and can be had, built at first use.

    `auto` wants them on a CPU unless another flag asks for what only the reference kernels do. Raises ConfigError if
    `native` was asked for and cannot be.
    """
    obstacle = _obstacle(config, device, model)
    if config.kernels == "reference" or (config.kernels == "auto" and obstacle is not None):
        return None
    if obstacle is not None:
        raise ConfigError(f"--kernels native: {obstacle}")
    from nanoserve.kernels import native_lib

    try:
        return native_lib.load()
    except KernelBuildError as error:
        if config.kernels == "native":
            raise ConfigError(f"--kernels native: {error}") from error
        log.warning("the native kernels are not available, so answers take several times as long: %s", error)
        return None


def _obstacle(config: EngineConfig, device: torch.device, model: ModelConfig | None) -> str | None:
    """Why a config, or a model, cannot run on the native kernels; None if it can."""
    if model is not None and (model.head_dim % NATIVE_LANES or model.head_dim > NATIVE_MAX_HEAD_DIM):
        heads = f"the model's have {model.head_dim}; drop --kernels native"
        return f"their heads have a multiple of {NATIVE_LANES} and at most {NATIVE_MAX_HEAD_DIM} numbers, {heads}"
    if device.type != "cpu":
        return f"they run on the CPU, not on {device.type}; drop one of the two flags"
    if config.block_size != NATIVE_BLOCK:
        return f"their K/V layout has blocks of {NATIVE_BLOCK}; drop --block-size {config.block_size}"
    if not config.capture_decode or config.attention_read == "rectangle":
        return "they replay recorded programs that read pages; drop --no-capture-decode and --attention-read"
    if config.dtype != "auto" or config.graph_backend != "auto":
        return "they bring their own number formats and backend; drop --dtype and --graph-backend"
    return None


def pick_backend(config: EngineConfig, device: torch.device) -> GraphBackend:
    """Raises ConfigError for a backend that this device or build has not."""
    name = config.graph_backend
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "eager"
    if name == "eager":
        return EagerBackend()
    if name == "cuda" and device.type == "cuda":
        return CudaBackend(device)
    raise ConfigError(f"--graph-backend {name} does not run on {device.type}; use auto")


def pick_quantise(config: EngineConfig) -> Quantise:
    return Quantise(
        matrices=None if config.quantize == "none" else config.quantize,
        head=None if config.quantize_head == "auto" else config.quantize_head,
    )


def pick_dtype(config: EngineConfig, device: torch.device) -> str:
    """On the CPU the reference kernels run in fp32: the oracle's precision, and faster there than emulated bf16."""
    return "float32" if config.dtype == "auto" and device.type == "cpu" else config.dtype
