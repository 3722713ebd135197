"""config.json, generation_config.json and GGUF headers become one ModelConfig, or one line that names the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import BadCheckpoint
from nanoserve.models.config import ModelConfig, RopeConfig, SamplingDefaults, load_config
from tests.models.tiny import COMMON, LLAMA3, VARIANTS, YARN, source_of


def read(folder: Path, variant: str = "llama", *, generation: Any = None, **fields: Any) -> ModelConfig:
    values = COMMON | VARIANTS[variant] | fields
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(source_of(folder))


def refused(folder: Path, *naming: str, variant: str = "llama", **fields: Any) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(folder, variant, **fields)
    for text in (str(folder / "config.json"), *naming):
        assert text in str(caught.value)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_config_equals_transformers_when_read(variant: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    ours: ModelConfig = read(tmp_path, variant)
    theirs = AutoConfig.from_pretrained(tmp_path)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    assert ours.rope.rope_type == rope["rope_type"]
    assert ours.rope.rope_theta == rope["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_fields_take_the_familys_defaults_when_read(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    fields = {name: COMMON[name] for name in needed} | {"model_type": model_type, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    ours, theirs = load_config(source_of(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 2)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.windows[0] == (4096 if model_type == "mistral" else None)
    assert ours.rope == RopeConfig(rope_theta=theirs.rope_parameters["rope_theta"])
    assert ours.dtype == "bfloat16"


def test_rope_is_the_same_when_written_the_old_way(tmp_path: Path) -> None:
    new = read(tmp_path, rope_parameters=LLAMA3)
    old = read(tmp_path, rope_theta=10_000.0, rope_scaling={k: v for k, v in LLAMA3.items() if k != "rope_theta"})
    assert new == old
    assert new.rope == RopeConfig("llama3", 10_000.0, 4.0, 64, 1.0, 4.0)


def test_yarn_factor_is_the_ratio_of_contexts_when_null(tmp_path: Path) -> None:
    assert read(tmp_path, rope_parameters=YARN | {"factor": None}).rope.factor == 512 / 64


def test_eos_ids_are_the_union_when_both_files_name_some(tmp_path: Path) -> None:
    config = read(tmp_path, eos_token_id=[7, 2], generation={"eos_token_id": [9, 2]})
    assert config.eos_token_ids == (2, 7, 9)
    assert read(tmp_path, eos_token_id=None, generation={"eos_token_id": 4}).eos_token_ids == (4,)


def test_sampling_defaults_are_taken_when_the_model_samples(tmp_path: Path) -> None:
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert read(tmp_path, generation=sampled).sampling == SamplingDefaults(0.6, 20, 0.95, None, 1.05)
    assert read(tmp_path, generation=sampled | {"do_sample": False}).sampling == SamplingDefaults()


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("top_p", 0), ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0)]
)
def test_sampling_default_is_named_when_out_of_range(field: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=rf"generation_config\.json: {field} is {value}"):
        read(tmp_path, generation={"do_sample": True, field: value})


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_is_read_when_either_name_is_used(field: str, tmp_path: Path) -> None:
    assert read(tmp_path, **({"dtype": None} | {field: "bfloat16"})).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "naming"),
    [
        ({"model_type": "gemma2"}, ("model_type", "'gemma2'", "qwen3")),
        ({"model_type": None}, ("model_type",)),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("architectures", "LlamaForCausalLM")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "silu")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_type", "'dynamic'", "yarn")),
        ({"rope_scaling": {"type": "longrope"}}, ("type", "'longrope'")),
        ({"rope_scaling": "yarn"}, ("rope_scaling", "object")),
        ({"rope_parameters": {"rope_type": "linear"}}, ("factor", "missing")),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, ("high_freq_factor",)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_theta": 0}, ("rope_theta",)),
        ({"hidden_size": 63}, ("hidden_size", "63", "multiple")),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "3")),
        ({"head_dim": 15}, ("head_dim", "15", "even")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"vocab_size": "96"}, ("vocab_size", "'96'")),
        ({"vocab_size": 2.5}, ("vocab_size", "2.5")),
        ({"vocab_size": None}, ("vocab_size", "missing")),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "'yes'")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps",)),
        ({"eos_token_id": 96}, ("eos_token_id", "96")),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
        ({"dtype": "int8"}, ("dtype", "'int8'", "bfloat16")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_field_is_named_when_the_config_cannot_be_honoured(
    fields: dict[str, Any], naming: tuple[str, ...], tmp_path: Path
) -> None:
    refused(tmp_path, *naming, **fields)


def test_layer_types_are_named_when_unknown_or_too_few(tmp_path: Path) -> None:
    refused(tmp_path, "layer_types", variant="qwen3", layer_types=["chunked_attention"] * 3)
    refused(tmp_path, "layer_types", "2 long", variant="qwen3", layer_types=["full_attention"] * 2)
    refused(tmp_path, "layer_types", variant="mistral", layer_types=["full_attention"] * 3)


def test_window_is_named_when_below_one(tmp_path: Path) -> None:
    refused(tmp_path, "sliding_window", variant="mistral", sliding_window=0)


def test_config_is_read_without_torch_when_loaded() -> None:
    code = (
        "import sys; from nanoserve.source import resolve; from nanoserve.models.config import load_config; "
        "print(load_config(resolve('smollm2-135m')).vocab_size); "
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("49152", 0), done.stderr
