"""Safetensors folders: one file or shards, any float dtype, and one line for every way they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve.errors import BadCheckpoint, ConfigError, OutOfMemory
from nanoserve.models.assembly import TorchWeights, assemble, weight_bytes
from nanoserve.models.config import load_config
from nanoserve.models.load import LoadedModel, load_model
from nanoserve.models.safetensors_loader import SafetensorsCheckpoint
from tests.models.dense import dense_logits
from tests.models.tiny import source_of, token_ids, write_model

IDS = token_ids(12)
EMBED, HEAD, GATE = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate_proj.weight"


def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(source_of(folder), dtype=dtype, bar=False)


def edit(folder: Path, changes: dict[str, Tensor | None]) -> Path:
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor | None] = {name: tensor.clone() for name, tensor in load_file(path).items()}
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(kept, path)
    return folder


def shard(folder: Path) -> Path:
    """Split model.safetensors in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].clone() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, *naming: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        load(folder)
    for text in (str(folder), *naming):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_logits_are_the_same_when_the_model_is_sharded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    whole = dense_logits(load(folder).decoder, IDS)
    assert torch.equal(dense_logits(load(shard(folder)).decoder, IDS), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for_when_loaded(dtype: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", dtype=torch.bfloat16)
    weights = load(folder, dtype).decoder.weights
    stored = load_file(folder / "model.safetensors")
    assert weights.embed.dtype == getattr(torch, dtype)
    assert torch.equal(weights.embed, stored[EMBED].to(getattr(torch, dtype)))
    assert torch.equal(weights.layers[1].gate_up[:96], stored[GATE].to(getattr(torch, dtype)))


def test_auto_dtype_is_the_weights_own_when_the_config_names_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", dtype=torch.float16)
    fields = json.loads((folder / "config.json").read_text())
    del fields["dtype"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).decoder.weights.embed.dtype == torch.float16


def test_weights_survive_when_the_file_is_deleted_after_loading(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    decoder = load(folder).decoder
    before = dense_logits(decoder, IDS)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(dense_logits(decoder, IDS), before)


def test_progress_ends_at_the_total_when_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model", "llama-tied")
    seen: list[tuple[int, int]] = []
    weights = load_model(source_of(folder), progress=lambda done, total: seen.append((done, total))).decoder.weights
    total = weight_bytes(load_config(source_of(folder)), 4)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert weights.nbytes == total
    captured = capsys.readouterr()
    assert "loading model" in captured.err
    assert captured.out == ""


def test_rope_tables_have_the_length_asked_for_when_loaded(tmp_path: Path) -> None:
    source = source_of(write_model(tmp_path / "model"))
    assert load_model(source, bar=False).decoder.max_positions == 512
    assert load_model(source, bar=False, max_positions=40).decoder.max_positions == 40


def test_dtype_is_refused_when_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int4'.*bfloat16"):
        load(write_model(tmp_path / "model"), "int4")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")])
def test_remedy_is_named_when_the_weights_do_not_fit(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"bytes of weights do not fit; .*--dtype"):
        assemble_failing_with(error, write_model(tmp_path / "model"))


def test_other_errors_pass_when_the_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        assemble_failing_with(RuntimeError("something else"), write_model(tmp_path / "model"))


def assemble_failing_with(error: Exception, folder: Path) -> None:
    class Failing(SafetensorsCheckpoint):
        def fetch(self, name: str) -> Tensor:
            raise error

    checkpoint = Failing(folder)
    assemble(
        load_config(source_of(folder)),
        checkpoint,
        maker=TorchWeights(torch.float32, torch.device("cpu")),
        progress=lambda done, total: None,
    )


def test_tensor_is_named_when_missing(tmp_path: Path) -> None:
    refused(edit(write_model(tmp_path / "model"), {GATE: None}), "model.safetensors", GATE, "[96, 64]", "missing")


def test_tensor_is_named_when_extra(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    refused(edit(write_model(tmp_path / "model"), {name: torch.ones(16)}), "model.safetensors", name, "belongs to")


def test_tensor_is_named_when_misshaped(tmp_path: Path) -> None:
    folder = edit(write_model(tmp_path / "model"), {GATE: torch.ones(96, 65)})
    refused(folder, "model.safetensors", GATE, "[96, 65]", "[96, 64]")


def test_tensor_is_named_when_not_floating(tmp_path: Path) -> None:
    folder = edit(write_model(tmp_path / "model"), {GATE: torch.ones(96, 64, dtype=torch.int8)})
    refused(folder, GATE, "I8", "BF16")


def test_head_is_named_when_an_untied_model_lacks_it(tmp_path: Path) -> None:
    refused(edit(write_model(tmp_path / "model"), {HEAD: None}), HEAD, "missing")


def test_derived_buffers_are_ignored_when_saved_beside_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before = dense_logits(load(folder).decoder, IDS)
    edit(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(dense_logits(load(folder).decoder, IDS), before)


def test_head_is_shared_when_a_tied_model_stores_an_equal_copy(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama-tied")
    edit(folder, {HEAD: load_file(folder / "model.safetensors")[EMBED].clone()})
    weights = load(folder).decoder.weights
    assert weights.head is weights.embed


def test_head_is_the_stored_one_when_a_tied_model_stores_a_different_one(tmp_path: Path) -> None:
    folder = edit(write_model(tmp_path / "model", "llama-tied"), {HEAD: torch.full((96, 64), 0.5)})
    assert torch.equal(load(folder).decoder.weights.head, torch.full((96, 64), 0.5))


def test_file_is_named_when_truncated(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for size in (0, 7, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        refused(folder, "model.safetensors")


def test_shard_is_named_when_missing_or_when_it_lacks_a_tensor(tmp_path: Path) -> None:
    folder = shard(write_model(tmp_path / "model"))
    second = folder / "model-00002-of-00002.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(second).items()}
    dropped, _ = tensors.popitem()
    save_file(tensors, second)
    refused(folder, second.name, dropped)
    second.unlink()
    refused(folder, second.name)


def test_tensor_is_named_when_two_shards_hold_it(tmp_path: Path) -> None:
    folder = shard(write_model(tmp_path / "model"))
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    tensors = {name: tensor.clone() for name, tensor in load_file(second).items()}
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor.clone()}, second)
    refused(folder, second.name, name, first.name)
