"""The collector is off while it would only be in the way, and on afterwards."""

from __future__ import annotations

import gc

import pytest
import torch

import holdfast as hf
from holdfast.garbage import no_garbage_collection


def test_it_is_on_again_after_errors_and_nesting():
    seen = [gc.isenabled()]
    with pytest.raises(KeyError), no_garbage_collection(), no_garbage_collection():
        seen.append(gc.isenabled()) or {}["missing"]
    assert [*seen, gc.isenabled()] == [True, False, True]


def test_who_turned_it_off_finds_it_off():
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_save_leaves_it_on(tmp_path):
    hf.save({"w": torch.ones(2)}, tmp_path / "x")
    assert gc.isenabled()
    with pytest.raises(hf.errors.CheckpointExistsError):
        hf.save({"w": torch.ones(2)}, tmp_path / "x")
    assert gc.isenabled()
