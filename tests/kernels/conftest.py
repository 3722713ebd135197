"""Native pools for every instruction set this machine runs, each built once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nanoserve.errors import KernelBuildError
from nanoserve.kernels import native_build, native_lib
from tests.kernels.native import Harness

FLAGS = native_build.cpu_flags()


def runnable(isa: str) -> bool:
    try:
        return native_build.pick_isa(FLAGS, isa) == isa
    except KernelBuildError:
        return False


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=[isa for isa in native_build.ISAS if runnable(isa)])
def library(request: pytest.FixtureRequest) -> native_lib.NativeLibrary:
    return native_lib.load(request.param)


@pytest.fixture(scope="session")
def fastest() -> native_lib.NativeLibrary:
    return native_lib.load()


@pytest.fixture(scope="session")
def harness(library: native_lib.NativeLibrary) -> Iterator[Harness]:
    made = Harness(library, threads=2)
    yield made
    made.pool.close()
