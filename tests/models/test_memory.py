"""Resident memory while weights are loaded, in a process of its own: the packed weights and little beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkout import ROOT
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import write_model

MIB = 1 << 20
LOAD = """
import json, sys
from pathlib import Path
import torch
from nanoserve.models.load import load_model
from nanoserve.models.quantise import Quantise
from nanoserve.runners import native_weights
from nanoserve.source import resolve

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

Path("/proc/self/clear_refs").write_text("5")  # the peak so far is the imports'
before = status("VmRSS")
quantise = Quantise(sys.argv[2]) if len(sys.argv) > 2 else None
loaded = load_model(resolve(sys.argv[1]), maker=native_weights(), quantise=quantise, max_positions=64, bar=False)
print(json.dumps({
    "packed": loaded.decoder.weights.nbytes, "peak": status("VmHWM") - before, "after": status("VmRSS") - before,
}))
"""

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")


def loading(model: str, *quantise: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", LOAD, model, *quantise], cwd=ROOT, capture_output=True, timeout=170)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, int] = json.loads(done.stdout)
    print({name: f"{value / MIB:.0f} MiB" for name, value in found.items()})
    return found


def check(found: dict[str, int]) -> None:
    assert found["peak"] < 1.3 * found["packed"] + 300 * MIB, found
    assert found["after"] < found["packed"] + 150 * MIB, found


def write_big(folder: Path, dtype: torch.dtype) -> Path:
    """537 MB of 16-bit floats."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    write_model(folder, "llama", dtype=dtype, **sizes, **heads)
    assert (folder / "model.safetensors").stat().st_size > 500e6
    return folder


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_big(tmp_path_factory.mktemp("big"), torch.bfloat16)


@linux
@pytest.mark.model
def test_the_default_model_is_loaded_in_little_more_than_its_packed_weights() -> None:
    check(loading("smollm2-135m"))


@linux
@pytest.mark.slow
@pytest.mark.parametrize("quantise", [(), ("w4",), ("w8",)], ids=["stored", "w4", "w8"])
def test_a_big_safetensors_folder_is_loaded_in_little_more_than_its_packed_weights(
    big: Path, quantise: tuple[str, ...]
) -> None:
    check(loading(str(big), *quantise))


@linux
@pytest.mark.slow
def test_a_big_gguf_file_is_loaded_in_little_more_than_its_packed_weights(tmp_path: Path) -> None:
    folder = write_big(tmp_path / "hf", torch.float16)
    check(loading(str(write_gguf(folder, tmp_path / "big.gguf", "F16"))))
