"""Plans that the gates accept, and random programs, under the sanitizers: no read or write but of what a record may
touch, no undefined behaviour, no race."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from nanoserve.buckets import GraphKey
from nanoserve.build import assemble, plan_pool
from nanoserve.choices import choose
from nanoserve.engine import Engine
from nanoserve.kernels import native_build, native_lib
from nanoserve.kernels.native_lib import ROWS, Op
from nanoserve.kernels.native_pack import NATIVE_TYPES
from nanoserve.metrics import Metrics
from nanoserve.models.config import load_config
from nanoserve.models.load import load_model
from nanoserve.request import SamplingParams
from nanoserve.runners import native_weights
from nanoserve.source import resolve
from tests.engines import sequence_of
from tests.kernels.conftest import runnable
from tests.kernels.image import OPERANDS, READ, CameraLibrary, Image, integers
from tests.kernels.random_program import MATRICES, random_program
from tests.tiny_engine import tiny_config
from tests.tiny_folder import write_served_model

DRIVER = Path(__file__).with_name("driver.c")
ISAS = [isa for isa in native_build.ISAS if runnable(isa)]
SEQUENCES, STEP_ROWS, LENGTH = 3, 32, 144
DRAWN = 14
MODELS = {
    "head_dim 64, 4 heads a group": {"head_dim": 64, "num_key_value_heads": 1},
    "head_dim 80": {"head_dim": 80, "num_attention_heads": 2},
    "head_dim 96, qk-norm": {"variant": "qwen3", "head_dim": 96, "num_attention_heads": 2},
    "head_dim 128": {"head_dim": 128, "num_attention_heads": 2},
    "head_dim 256": {"head_dim": 256, "num_attention_heads": 2},
    "sliding window, head_dim 64": {"variant": "mistral-window", "head_dim": 64, "sliding_window": 40},
    "biases, bf16": {"variant": "llama-biases", "head_dim": 16, "dtype": torch.bfloat16},
}


# --- launches --------------------------------------------------------------------------------------------------------


def film(folder: Path) -> tuple[Engine, list[Image]]:
    """A tiny engine with every gate on, and where the images of its launches go. Its pool holds all sequences at their
    longest, and nothing more."""
    config = tiny_config(
        folder, kernels="native", attention_read="auto", max_sequences=SEQUENCES, max_step_rows=STEP_ROWS,
        max_model_len=LENGTH, kv_memory_bytes=None, threads=2,
    )  # fmt: skip
    source = resolve(config.model)
    choices = choose(config, load_config(source))
    assert choices.library is not None
    library = CameraLibrary(choices.library, features)
    choices = replace(choices, library=library)  # type: ignore[arg-type]
    loaded = load_model(source, dtype="float32", device="cpu", maker=native_weights(), max_positions=LENGTH, bar=False)
    pool = plan_pool(choices, loaded.config, loaded.dtype)
    assert pool.num_blocks * pool.block_size == SEQUENCES * LENGTH
    return assemble(choices, loaded, pool, Metrics("test")), library.images


def serve(engine: Engine) -> None:
    """Nothing but pads in the largest shapes; then as many sequences as there are rows, each to the last position."""
    rows = STEP_ROWS
    for key in (GraphKey("head", SEQUENCES, None), GraphKey("body", rows, None)):
        engine.runner.capture(key, "warm")
    engine.runner.graphs.rehearse(GraphKey("body", rows, None), GraphKey("head", SEQUENCES, None))  # type: ignore[union-attr]
    for n, prompt in enumerate((LENGTH - 60, LENGTH - 44, LENGTH - 44)):
        params = SamplingParams(temperature=0.7 * n, top_p=0.9, top_k=30 * n, min_p=0.01 * n)
        if n == 1:
            params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 1.0),), logprobs=5)
        ids = [(7 * i + n) % 256 for i in range(prompt)]
        engine.add(sequence_of(ids, max_tokens=LENGTH - prompt, params=params, request_id=f"r{n}", block_size=16))
    while engine.scheduler.has_work:
        engine.step()


def features(image: Image) -> set[str]:
    """What is extreme about a launch."""
    found: set[str] = set()
    for record, rows in zip(image.records, image.rows, strict=True):
        op = Op(record.head.op)
        found |= {"all pads"} if op is Op.ROPE and not rows else set()
        found |= {"chooses"} if op is Op.SAMPLE and rows == SEQUENCES else set()
        found |= {"full head"} if op is Op.LOGPROBS and rows == SEQUENCES else set()
        if op is Op.ROPE and rows:
            last = SEQUENCES * LENGTH - ROWS
            found |= {"last block"} if max(integers(record.rope.write_slots, rows)) >= last else set()
            found |= {"most rows"} if rows == STEP_ROWS else set()
        if op is Op.ATTENTION and rows:
            r = record.attention
            lens, sequences = integers(r.context_lens, rows), len(set(integers(r.table_rows, rows)))
            found |= {"longest context"} if LENGTH - 1 in lens else set()
            found |= {"chunk"} if sequences < rows else set()
            found |= {"chunk beside decode"} if 1 < sequences < rows else set()
            found |= {"window"} if r.window and max(lens) > r.window else set()
    return found or {"plain"}


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> list[Image]:
    """Launches of engines whose every step passes the gates."""
    images = []
    for number, fields in enumerate(MODELS.values()):
        fields = {"variant": "llama", **fields}
        folder = write_served_model(tmp_path_factory.mktemp("model") / str(number), num_hidden_layers=1, **fields)
        engine, taken = film(folder)
        serve(engine)
        wanted = {"all pads", "most rows", "chunk", "chunk beside decode", "chooses", "full head"}
        wanted |= {"last block", "longest context"}
        wanted |= {"window"} if "sliding_window" in fields else set()
        assert wanted <= set().union(*(image.shown for image in taken))
        images += taken
    return images


def drawn(programs: int) -> list[Image]:
    """Launches of random programs: every op, every kind of weights, every gate, sizes of all sorts."""
    library = CameraLibrary(native_lib.load())
    for seed in range(programs):
        random_program(library, random.Random(seed))
    return library.images


# --- the driver ------------------------------------------------------------------------------------------------------


Drivers = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    """The driver of an instruction set under a sanitizer, built once."""
    return cache(lambda isa, sanitizer: build_driver(isa, sanitizer, tmp_path_factory.mktemp(isa)))


def build_driver(isa: str, sanitizer: str, folder: Path) -> Path:
    units, _ = native_build.source_files()
    flags = [*native_build.ISA_FLAGS[isa], f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    settings = ["-std=c11", "-O1", "-g1", "-fno-var-tracking", "-ffp-contract=off", f"-I{native_build.SOURCES}"]

    def compile_unit(unit: Path) -> Path:
        made = folder / f"{unit.stem}.o"
        run_compiler(*settings, *flags, "-c", unit, "-o", made)
        return made

    with ThreadPoolExecutor(2) as workers:
        objects = list(workers.map(compile_unit, sorted((*units, DRIVER), key=lambda unit: -unit.stat().st_size)))
    run_compiler(*flags, *objects, "-o", folder / "driver", "-lm", "-lpthread")
    return folder / "driver"


def run_compiler(*arguments: str | Path) -> None:
    command = [native_build.find_compiler(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "san" in done.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr


def replay(images: list[Image], driver: Path, folder: Path) -> None:
    paths = [str(image.write(folder / f"{number:04}.image")) for number, image in enumerate(images)]
    done = subprocess.run([str(driver), *paths], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("isa", ISAS)
def test_accepted_plans_touch_nothing_but_their_operands(
    isa: str, drivers: Drivers, accepted: list[Image], tmp_path: Path
) -> None:
    """Both sanitizers on the instruction set that serves here; on the others the second is in the slow tier."""
    sanitizer = "address,undefined" if isa == ISAS[-1] else "address"
    replay(accepted + drawn(DRAWN), drivers(isa, sanitizer), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_many_random_programs_are_clean(
    isa: str, sanitizer: str, drivers: Drivers, accepted: list[Image], tmp_path: Path
) -> None:
    replay(accepted + drawn(100), drivers(isa, sanitizer), tmp_path)


def test_random_programs_have_every_op_and_every_kind_of_weights() -> None:
    records = [record for image in drawn(DRAWN) for record in image.records]
    assert {Op(record.head.op) for record in records} == set(OPERANDS) == set(Op)
    kinds = {record.linear.w.kind for record in records if record.head.op == Op.LINEAR}
    assert kinds == {native_lib.Kind(kind) for kind in range(len(native_lib.Kind))}
    assert len(MATRICES) == len(NATIVE_TYPES) + 3


def test_the_driver_sees_an_access_past_an_operand_of_every_op(drivers: Drivers, tmp_path: Path) -> None:
    """Of some operand of each op, the last 8 bytes are declared out of bounds."""
    images = sorted(drawn(DRAWN), key=lambda image: len(image.records))

    def seen(image: Image, number: int, at: int) -> bool:
        extents = [list(each) for each in image.extents]
        extents[number][at] = replace(extents[number][at], nbytes=extents[number][at].nbytes - 8)
        path = replace(image, extents=extents).write(tmp_path / "short.image")
        done = subprocess.run([str(drivers(ISAS[0], "address")), str(path)], capture_output=True, text=True)
        return "use-after-poison" in done.stderr

    for op in Op:
        image, number = next(
            (image, number)
            for image in images
            for number, record in enumerate(image.records)
            if record.head.op == op and image.rows[number] and len(image.extents[number]) > 1
        )
        shortened = [at for at, extent in enumerate(image.extents[number]) if extent.use == READ and extent.nbytes > 8]
        assert any(seen(image, number, at) for at in shortened), op.name
