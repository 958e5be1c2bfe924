"""Memory for snapshots: lent, and lent again only when nobody uses it."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._background import arenas
from holdfast._background.arenas import ArenaPool, Memory, aligned, shared_arena_of

HERE = [Memory.PAGEABLE, Memory.SHARED]


@pytest.mark.parametrize("memory", HERE)
def test_memory_in_use_is_not_lent_again(memory: Memory) -> None:
    pool = ArenaPool(memory, keep=2)
    view = pool.lend(100).tensor(10, 10).fill_(1)
    pool.lend(100).tensor(0, 100).fill_(2)
    assert view.tolist() == [1] * 10


@pytest.mark.parametrize("memory", HERE)
def test_memory_that_came_back_is_lent_again_if_it_is_kept(memory: Memory) -> None:
    pool = ArenaPool(memory, keep=2)
    address = pool.lend(100).tensor(0, 100).data_ptr()
    assert pool.lend(90).tensor(0, 90).data_ptr() == address


def test_memory_that_is_not_kept_is_given_back_to_the_system() -> None:
    before = open_files()
    pool = ArenaPool(Memory.SHARED)
    tensor = pool.lend(100).tensor(0, 100)
    assert open_files() > before
    del tensor
    assert open_files() == before


def test_a_dropped_pool_keeps_nothing() -> None:
    before = open_files()
    pool = ArenaPool(Memory.SHARED, keep=2)
    returned, in_use = pool.lend(100).tensor(0, 100), pool.lend(100).tensor(0, 100).fill_(3)
    both = open_files() - before
    del returned
    assert open_files() == before + both
    pool.drop()
    assert open_files() == before + both // 2
    assert in_use.sum() == 300
    del in_use
    assert open_files() == before


def test_a_pool_keeps_no_more_than_it_needs_to_go_on() -> None:
    before = open_files()
    pool = ArenaPool(Memory.SHARED, keep=2)
    many = [pool.lend(100).tensor(0, 100) for _ in range(6)]
    one = (open_files() - before) // 6
    del many
    assert open_files() == before + 2 * one


def test_a_forked_child_does_not_use_the_memory_of_its_parent() -> None:
    pool = ArenaPool(Memory.SHARED, keep=2)
    kept = pool.lend(100).tensor(0, 100).fill_(1)
    arena = shared_arena_of(kept)
    assert arena is not None
    del kept
    child = os.fork()
    if child == 0:
        pool.lend(100).tensor(0, 100).fill_(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.lend(100).tensor(0, 100).tolist() == [1] * 100


def test_memory_that_has_become_too_small_is_given_up() -> None:
    before = open_files()
    pool = ArenaPool(Memory.SHARED, keep=2)
    pool.lend(100)
    one = open_files() - before
    larger = pool.lend(5000).tensor(4000, 1000)
    assert open_files() == before + one
    assert len(larger) == 1000


def open_files() -> int:
    gc.collect()  # files that other tests have left to it
    return len(os.listdir("/proc/self/fd"))


def test_shared_memory_can_be_mapped_through_its_descriptor() -> None:
    tensor = ArenaPool(Memory.SHARED).lend(64).tensor(8, 8).fill_(7)
    arena = shared_arena_of(tensor)
    assert arena is not None
    assert arena.descriptor is not None
    with mmap.mmap(arena.descriptor, arena.size) as seen:
        assert seen[8:16] == bytes([7]) * 8


def test_a_file_stands_in_where_there_are_no_files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(arenas.os, "memfd_create")
    tensor = ArenaPool(Memory.SHARED).lend(64).tensor(0, 64).fill_(7)
    arena = shared_arena_of(tensor)
    assert arena is not None
    assert arena.descriptor is not None
    with mmap.mmap(arena.descriptor, arena.size) as seen:
        assert seen[:] == bytes([7]) * 64


def test_ordinary_tensors_are_in_no_shared_memory() -> None:
    assert shared_arena_of(torch.zeros(3)) is None
    assert shared_arena_of(ArenaPool(Memory.PAGEABLE).lend(10).tensor(0, 10)) is None


def test_tensors_of_one_block_have_storages_of_their_own() -> None:
    """Or else saving one of them with `torch.save` would save all of them."""
    lease = ArenaPool().lend(100)
    assert [lease.tensor(start, 10).untyped_storage().nbytes() for start in (0, 10, 90)] == [10] * 3


def test_nothing_takes_no_memory() -> None:
    assert ArenaPool(Memory.SHARED).lend(0).tensor(0, 0).numel() == 0


@given(st.integers(0, 10**12))
def test_tensors_start_at_the_next_aligned_place(size: int) -> None:
    assert aligned(size) % arenas.ALIGNMENT == 0
    assert size <= aligned(size) < size + arenas.ALIGNMENT
