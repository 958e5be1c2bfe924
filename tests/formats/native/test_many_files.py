"""A checkpoint of many ranks has more files than a process may have open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import DamagedCheckpointError

STATE = {f"t{number:03}": torch.full((16,), float(number)) for number in range(300)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "a"
    holdfast.save(STATE, folder, max_file_size=64)
    assert len(list(folder.glob("data-*"))) == 300
    return folder


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_all_of_them_are_read(folder, few_descriptors):
    state = {key: torch.zeros(16) for key in STATE}
    holdfast.load(state, folder)
    assert all(torch.equal(state[key], value) for key, value in STATE.items())
    with holdfast.open(folder) as checkpoint:
        assert checkpoint.verify().ok


def test_none_stays_open(folder):
    before = os.listdir("/proc/self/fd")
    holdfast.load({key: torch.zeros(16) for key in STATE}, folder)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_that_is_missing_is_found_before_anything_is_changed(folder):
    gone = max(folder.glob("data-*-299.safetensors"))
    content = gone.read_bytes()
    gone.unlink()
    state = {key: torch.zeros(16) for key in STATE}
    try:
        with pytest.raises(DamagedCheckpointError, match=gone.name):
            holdfast.load(state, folder)
    finally:
        gone.write_bytes(content)
    assert not any(tensor.any() for tensor in state.values())
