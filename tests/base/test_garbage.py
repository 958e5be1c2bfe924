"""The collector is off while it would only be in the way, and on afterwards; nothing is freed in one long go."""

from __future__ import annotations

import gc

import pytest
import torch

import holdfast
from holdfast._base import garbage
from holdfast._base.garbage import let_go_in_parts, no_garbage_collection


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
    holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
    assert gc.isenabled()
    with pytest.raises(holdfast.errors.CheckpointExistsError):
        holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
    assert gc.isenabled()


class Collections:
    """Counts what the collector does."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: object) -> None:
        self.count += phase == "start"


def many_objects() -> list[list[int]]:
    return [[number] for number in range(2 * garbage._LOOKED_AT_IN_A_MOMENT)]


def test_the_objects_made_meanwhile_are_not_looked_at_all_at_once():
    gc.collect()
    with Collections() as seen:
        with no_garbage_collection():
            kept = many_objects()
        few = [[number] for number in range(20)]
    assert seen.count == 0
    assert len(kept) > len(few)


def test_garbage_made_meanwhile_is_found_later():
    with no_garbage_collection():
        kept = many_objects()
        ring: list[object] = [Canary()]
        ring.append(ring)
        del ring
    before = Canary.sung
    gc.collect()
    assert Canary.sung == before + 1
    assert kept


class Canary:
    """Tells when it goes."""

    sung = 0

    def __del__(self) -> None:
        Canary.sung += 1


def test_what_the_program_has_frozen_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_garbage_collection():
            kept = many_objects()
        assert abs(gc.get_freeze_count() - frozen) < 100  # other threads let go of some objects
        assert kept
    finally:
        gc.unfreeze()


def test_objects_go_in_parts():
    left: list[int] = []

    class Counting:
        def __del__(self) -> None:
            left.append(len(objects))

    objects = [Counting() for _ in range(3 * garbage.FREED_AT_ONCE + 1)]
    let_go_in_parts(objects)
    assert objects == []
    assert sorted(set(left)) == [0, 1] + [1 + n * garbage.FREED_AT_ONCE for n in (1, 2)]
