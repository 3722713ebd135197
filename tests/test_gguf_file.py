"""The GGUF reader against the reference writer, and against files damaged on purpose."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.errors import BadCheckpoint
from nanoserve.gguf_file import TENSOR_TYPES, read_gguf

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e4)
    writer.add_add_bos_token(False)
    writer.add_token_list(["a", "Ġb", "ß", ""])
    writer.add_token_scores([0.5, -1.0, 0.0, 2.0])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_tensor("a.weight", WEIGHT)
    writer.add_tensor("b.weight", WEIGHT[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header(*, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_entry(name: str, shape: list[int], kind: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def damaged(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_metadata_and_tensors_are_read_when_the_file_is_whole(written: Path) -> None:
    file = read_gguf(written)
    assert file.path == written
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 1e4
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb", "ß", ""]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 0.0, 2.0]
    assert file.metadata["tokenizer.ggml.token_type"] == [1, 1, 3, 1]
    assert file.tensors["a.weight"].shape == (4, 6)
    assert file.tensors["b.weight"].type_name == "F16"
    assert np.array_equal(file.raw("a.weight").view(np.float32).reshape(4, 6), WEIGHT)
    assert np.array_equal(file.raw("b.weight").view(np.float16), WEIGHT[0].astype(np.float16))


def test_mapped_bytes_are_read_only_when_handed_out(written: Path) -> None:
    assert not read_gguf(written).raw("a.weight").flags.writeable


def test_type_table_is_ggmls_when_compared_with_the_library() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, (name, block, nbytes) in TENSOR_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, *GGML_QUANT_SIZES[kind]) == (name, block, nbytes)


def test_nested_arrays_are_lists_when_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 7, 8)
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(keys=1) + string("k") + struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    assert read_gguf(path).metadata == {"k": [[7, 8], [7, 8]]}


def test_empty_file_is_refused_when_opened(tmp_path: Path) -> None:
    assert "0 bytes" in damaged(tmp_path, b"")


def test_missing_file_is_refused_when_opened(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        read_gguf(tmp_path / "absent.gguf")


def test_magic_is_quoted_when_it_is_not_gguf(tmp_path: Path) -> None:
    assert "b'PK" in damaged(tmp_path, b"PK\x03\x04" + bytes(60))


@pytest.mark.parametrize("version", [0, 1, 4])
def test_version_is_named_when_unsupported(tmp_path: Path, version: int) -> None:
    assert f"version {version}" in damaged(tmp_path, header(version=version))


def test_byte_order_is_named_when_the_file_is_big_endian(tmp_path: Path) -> None:
    assert "big endian" in damaged(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


@pytest.mark.parametrize("counts", [(2**60, 0), (0, 2**60), (2**63, 2**63)])
def test_counts_are_refused_when_the_file_cannot_hold_them(tmp_path: Path, counts: tuple[int, int]) -> None:
    assert "are left of" in damaged(tmp_path, header(tensors=counts[0], keys=counts[1]) + bytes(100))


@pytest.mark.parametrize("kind", [4, 8, 9])
def test_array_length_is_refused_when_absurd(tmp_path: Path, kind: int) -> None:
    body = string("tokens") + struct.pack("<IIQ", 9, kind, 2**61)
    assert "'tokens'" in damaged(tmp_path, header(keys=1) + body)


def test_string_length_is_refused_when_absurd(tmp_path: Path) -> None:
    assert "a string needs" in damaged(tmp_path, header(keys=1) + string("k") + struct.pack("<IQ", 8, 2**63))


def test_key_is_named_when_its_text_is_not_utf8(tmp_path: Path) -> None:
    body = string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"
    assert "'k'" in damaged(tmp_path, header(keys=1) + body)


def test_value_type_is_named_when_unknown(tmp_path: Path) -> None:
    assert "value type 99" in damaged(tmp_path, header(keys=1) + string("k") + struct.pack("<IQ", 99, 0))
    assert "array type 77" in damaged(tmp_path, header(keys=1) + string("k") + struct.pack("<IIQ", 9, 77, 0))


def test_nesting_is_refused_when_bottomless(tmp_path: Path) -> None:
    body = string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 64 + bytes(64)
    assert "nest deeper" in damaged(tmp_path, header(keys=1) + body)


def test_key_is_refused_when_it_occurs_twice(tmp_path: Path) -> None:
    entry = string("k") + struct.pack("<II", 4, 1)
    assert "twice" in damaged(tmp_path, header(keys=2) + entry + entry)


def test_tensor_type_is_named_when_unknown(tmp_path: Path) -> None:
    message = damaged(tmp_path, header(tensors=1) + tensor_entry("w", [4], 200) + bytes(64))
    assert "'w'" in message
    assert "200" in message


@pytest.mark.parametrize("shape", [[0, 32], [2, 31], [33]])
def test_shape_is_named_when_it_holds_no_whole_blocks(tmp_path: Path, shape: list[int]) -> None:
    assert str(shape) in damaged(tmp_path, header(tensors=1) + tensor_entry("w", shape, 2) + bytes(64))


@pytest.mark.parametrize("dimensions", [[], [1] * 5])
def test_dimensions_are_refused_when_out_of_range(tmp_path: Path, dimensions: list[int]) -> None:
    content = header(tensors=1) + tensor_entry("w", dimensions, 0) + bytes(64)
    assert f"{len(dimensions)} dimensions" in damaged(tmp_path, content)


def test_offset_is_refused_when_not_aligned(tmp_path: Path) -> None:
    assert "alignment" in damaged(tmp_path, header(tensors=1) + tensor_entry("w", [4], 0, 7) + bytes(64))


def test_tensor_is_refused_when_it_occurs_twice(tmp_path: Path) -> None:
    entry = tensor_entry("w", [4], 0)
    assert "twice" in damaged(tmp_path, header(tensors=2) + entry + entry + bytes(64))


def test_tensor_is_named_when_its_data_overflows_the_file(tmp_path: Path) -> None:
    content = header(tensors=1) + tensor_entry("huge", [2**40, 2**40], 0) + bytes(64)
    assert "'huge'" in damaged(tmp_path, content)
    content = header(tensors=1) + tensor_entry("far", [4], 0, 2**62) + bytes(64)
    assert "'far'" in damaged(tmp_path, content)


def test_alignment_is_refused_when_zero(tmp_path: Path) -> None:
    body = string("general.alignment") + struct.pack("<II", 4, 0)
    assert "general.alignment" in damaged(tmp_path, header(keys=1) + body)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused_when_opened(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = written.read_bytes()
    last = max(tensor.offset + tensor.nbytes for tensor in read_gguf(written).tensors.values())
    cut = data.draw(st.integers(0, last - 1))
    damaged(tmp_path_factory.mktemp("cut"), whole[:cut])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_flipped_header_bytes_never_raise_anything_else_when_opened(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "flipped.gguf"
    path.write_bytes(bytes(content))
    with contextlib.suppress(BadCheckpoint):
        file = read_gguf(path)
        assert all(tensor.offset + tensor.nbytes <= len(content) for tensor in file.tensors.values())
