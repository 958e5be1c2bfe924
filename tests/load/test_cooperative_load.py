"""Loads in which ranks read for each other, on live ranks: each stored byte once, and the same state as without."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
import holdfast.dcp
from holdfast._load import cooperative_reading, filling, read_division
from holdfast._load.cooperative_reading import CooperativeReading
from holdfast._load.filling import Converted
from holdfast._load.read_division import ReadDivision
from holdfast._ranks.private_group import PrivateGroup
from holdfast._settings import override
from tests.models import Net, ddp
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.sharding import dtensor_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@contextmanager
def patched(where: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace something in this process, which lives on after the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, replacement)
        yield


# --- states ---


def content(large: int) -> dict[str, torch.Tensor]:
    """Tensors of 4 MB and small ones, in several dtypes."""
    generator = torch.Generator().manual_seed(large)
    found = {f"large.{n}": torch.randn(1001 + n, 1024, generator=generator) for n in range(large)}
    found |= {f"small.{n}": torch.randn(70 + n, 3, generator=generator).bfloat16() for n in range(30)}
    return found | {"scalar": torch.tensor(3.5), "flags": torch.rand(9, 5, generator=generator) > 0.5}


def unique_bytes(large: int) -> int:
    return sum(tensor.nbytes for tensor in content(large).values())


def laid_out(layout: str, large: int, *, blank: bool = False) -> dict[str, Any]:
    whole = {key: torch.zeros_like(value) if blank else value for key, value in content(large).items()}
    size = dist.get_world_size()
    if layout == "ddp":
        return whole
    mesh = init_device_mesh("cpu", (2, size // 2) if layout == "hsdp" else (size,))
    found = {}
    for key, value in whole.items():
        if value.ndim == 0:
            placements: list[Any] = [Replicate()] * mesh.ndim
        elif layout == "hsdp":
            placements = [Replicate(), Shard(0)]
        else:
            placements = [Shard(value.ndim - 1 if layout == "columns" else 0)]
        found[key] = dtensor_of(value, mesh, placements)
    return found


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def assert_bits(one: Any, other: Any) -> None:
    for key, value in one.items():
        assert (
            local(value)
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(local(other[key]).contiguous().view(-1).view(torch.uint8))
        ), key


# --- how much is read ---


def save_as(layout: str, large: int, path: Path) -> None:
    holdfast.save(laid_out(layout, large), path)


def load_both_ways(layout: str, large: int, path: Path) -> tuple[int, int, int]:
    directly = laid_out(layout, large, blank=True)
    holdfast.load(directly, path, share_reads="off")
    state = laid_out(layout, large, blank=True)
    report = holdfast.load(state, path, share_reads="job")
    assert_bits(state, directly)
    assert_bits(state, laid_out(layout, large))
    return report.bytes_read, report.bytes_received, sum(local(value).nbytes for value in state.values())


@pytest.mark.parametrize("saved", ["ddp", "fsdp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_eight_ranks_read_every_byte_once(many, tmp_path, saved):
    many(8).run(save_as, saved, 12, tmp_path / "c")
    unique = unique_bytes(12)
    for layout in ("ddp", "hsdp", "fsdp", "columns"):
        by_rank = many(8).run(load_both_ways, layout, 12, tmp_path / "c")
        read, received, _ = by_rank[0]
        held = sum(own for _, _, own in by_rank)
        assert unique <= read <= 1.05 * unique, (saved, layout, read / unique)
        assert received >= held - unique  # what was not read from storage has come from another rank


@pytest.mark.parametrize(
    "size", [3, 5, pytest.param(2, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.long)]
)
def test_other_numbers_of_ranks(many, tmp_path, size):
    many(4).run(save_as, "fsdp", 4, tmp_path / "c")
    for layout in ("ddp", "fsdp"):
        read, _, _ = many(size).run(load_both_ways, layout, 4, tmp_path / "c")[0]
        assert read <= 1.08 * unique_bytes(4), (layout, read)


def load_trained(path: Path, share_reads: Any) -> Any:
    torch.manual_seed(1)
    model = ddp(Net(300, 1000, 70))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optimizer, "mine": holdfast.PerRank(torch.zeros(3)), "step": 0, "list": []}
    report = holdfast.load(state, path, share_reads=share_reads)
    tensors = [*model.state_dict().values()]
    tensors += [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    mine = state["mine"]
    return tensors, mine, state["step"], state["list"], optimizer.param_groups[0]["lr"], report.bytes_read


def save_trained(path: Path) -> Any:
    torch.manual_seed(0)
    model = ddp(Net(300, 1000, 70))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.rand(5, 300)).sum().backward()
    optimizer.step()
    mine = holdfast.PerRank(torch.full((3,), float(dist.get_rank())))
    holdfast.save({"model": model, "optim": optimizer, "mine": mine, "step": 7, "list": [1, {"a": "b"}]}, path)


def compare_trained(path: Path) -> tuple[int, int]:
    directly, together = load_trained(path, "off"), load_trained(path, "job")
    for one, other in zip(directly[0], together[0], strict=True):
        assert torch.equal(one, other)
    assert directly[2:5] == together[2:5] == (7, [1, {"a": "b"}], 0.02)
    for mine in (directly[1], together[1]):
        value = mine.value if isinstance(mine, holdfast.PerRank) else mine
        assert value.tolist() == [dist.get_rank()] * 3
    return directly[-1], together[-1]


def test_models_optimizers_values_and_tensors_per_rank_come_back(ranks, tmp_path):
    ranks(3).run(save_trained, tmp_path / "c")
    directly, together = ranks(3).run(compare_trained, tmp_path / "c")[0]
    assert together < 0.5 * directly


# --- where it goes ---


def load_into_odd_memory(path: Path, budget: int | None) -> None:
    expected = content(3)
    state: dict[str, Any] = {key: torch.zeros_like(value) for key, value in expected.items()}
    state["large.0"] = torch.zeros(1024, 1001).T
    state["large.1"] = torch.zeros(1002, 1024, dtype=torch.float64)
    state["large.2"] = np.zeros((1003, 1024), np.float32)
    if dist.get_rank() == 1:  # not alike on all ranks
        state["large.0"] = torch.zeros(1001, 2048)[:, ::2]
        state["large.2"] = torch.zeros(1003, 1024, dtype=torch.bfloat16)
        state["small.0"] = torch.zeros(70, 3, dtype=torch.float16)
    versions = {key: value._version for key, value in state.items() if isinstance(value, torch.Tensor)}
    report = holdfast.load(state, path, cast=True, share_reads="job", memory_budget=budget)
    for key, value in state.items():
        found = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        assert torch.equal(found, expected[key].to(found.dtype)), key
        assert not isinstance(value, torch.Tensor) or value._version > versions[key], key
    assert report.bytes_received > 0


@pytest.mark.parametrize("budget", [None, 256 << 10, 3 << 20])
def test_casts_strides_and_arrays_are_filled_from_what_others_read(ranks, tmp_path, budget):
    ranks(1).run(save_as, "ddp", 3, tmp_path / "c")
    ranks(3).run(load_into_odd_memory, tmp_path / "c", budget)


def load_all_into(parts: list[dict[str, Any]], path: Path, share_reads: str) -> list[bytes]:
    """The bytes of what every rank has of some tensors."""
    own = parts[dist.get_rank()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for key, (kind, shape) in own.items():
        whole = torch.zeros(shape)
        state[key] = whole if kind == "whole" else dtensor_of(whole, mesh, [Shard(int(kind))])
    holdfast.load(state, path, share_reads=share_reads, allow_unexpected="*")
    return [local(state[key]).numpy().tobytes() for key in sorted(state)]


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4)


def save_tensors(tensors: dict[str, tuple[str, tuple[int, int]]], path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for number, (key, (kind, shape)) in enumerate(tensors.items()):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        state[key] = whole if kind == "whole" else dtensor_of(whole, mesh, [Shard(int(kind))])
    holdfast.save(state, path)


@given(data=st.data())
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_layouts_load_alike_with_and_without(ranks, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("random") / "c"
    kinds = st.sampled_from(["whole", "0", "1"])
    sizes = data.draw(shapes)
    ranks(data.draw(st.integers(1, 4))).run(
        save_tensors, {f"t{n}": (data.draw(kinds), size) for n, size in enumerate(sizes)}, path
    )
    world = data.draw(st.integers(2, 4))
    common = {f"t{n}": (data.draw(kinds), size) for n, size in enumerate(sizes)}
    parts = [
        {key: entry for key, entry in common.items() if entry[0] != "whole" or data.draw(st.booleans())}
        for _ in range(world)
    ]
    if not all(parts):
        parts = [common] * world
    assert ranks(world).run(load_all_into, parts, path, "job") == ranks(world).run(load_all_into, parts, path, "off")


# --- where from ---


def save_elsewhere(form: str, path: Path) -> None:
    state = content(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "dcp":
            holdfast.dcp.save(state, checkpoint_id=path)
        elif form == "safetensors":
            safetensors.torch.save_file(state, path)
        else:
            torch.save(state, path)


@pytest.mark.parametrize("form", ["dcp", "safetensors", "torch"])
def test_other_formats_are_read_once_as_well(ranks, tmp_path, form):
    ranks(1).run(save_elsewhere, form, tmp_path / "c")
    for layout in ("ddp", "hsdp"):
        read, received, _ = ranks(4).run(load_both_ways, layout, 3, tmp_path / "c")[0]
        assert read <= 1.05 * unique_bytes(3), (form, layout)
        assert received > unique_bytes(3) // 2


def modes_of(path: Any) -> list[bool]:
    """Whether loads with each mode have ranks read for each other."""
    found = []
    for mode in ("auto", "job", "machine", "off"):
        state = laid_out("ddp", 1, blank=True)
        found.append(holdfast.load(state, path, share_reads=mode).bytes_received > 0)
        assert_bits(state, content(1))
    return found


def modes_at_a_far_place(path: Path) -> list[bool]:
    with patched(sys.modules["holdfast._load.load"], "is_far", lambda place: True):
        return modes_of(path)


def test_disks_of_the_machine_are_read_directly_unless_asked_otherwise(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 1, tmp_path / "c")
    assert ranks(2).run(modes_of, tmp_path / "c") == [[False, True, True, False]] * 2
    assert ranks(2).run(modes_at_a_far_place, tmp_path / "c") == [[True, True, True, False]] * 2


def load_on_two_machines(path: Path, mode: Any) -> int:
    state = laid_out("ddp", 4, blank=True)
    with override(machine=f"machine-{dist.get_rank() // 2}"):
        report = holdfast.load(state, path, share_reads=mode)
    assert_bits(state, content(4))
    return report.bytes_read


def test_every_machine_reads_every_byte_once_or_the_job_does(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 4, tmp_path / "c")
    unique = unique_bytes(4)
    assert ranks(4).run(load_on_two_machines, tmp_path / "c", "machine")[0] == pytest.approx(2 * unique, rel=0.05)
    assert ranks(4).run(load_on_two_machines, tmp_path / "c", "job")[0] == pytest.approx(unique, rel=0.05)


def load_over_a_group(path: Path) -> int:
    group = dist.new_group(backend="gloo")
    state = laid_out("ddp", 4, blank=True)
    with patched(PrivateGroup, "exchange", None):
        report = holdfast.load(state, path, share_reads="job", transfer_group=group)
    assert_bits(state, content(4))
    return report.bytes_read


def test_a_group_of_the_program_carries_the_bytes(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 4, tmp_path / "c")
    assert ranks(4).run(load_over_a_group, tmp_path / "c")[0] <= 1.05 * unique_bytes(4)


def load_over_a_group_of_some(path: Path) -> str:
    group = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="transfer_group has no rank") as info:
        holdfast.load(laid_out("ddp", 1), path, share_reads="job", transfer_group=group)
    return str(info.value)


def test_a_group_without_some_of_the_ranks_is_refused_on_all_of_them(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 1, tmp_path / "c")
    assert "rank [2]" in ranks(3).run(load_over_a_group_of_some, tmp_path / "c")[0]


def load_with_a_group_on_one_rank(path: Path) -> str:
    group = dist.new_group()
    with pytest.raises(
        holdfast.errors.RankDisagreementError, match="only some ranks were given a transfer_group"
    ) as info:
        holdfast.load(
            laid_out("ddp", 1), path, share_reads="job", transfer_group=group if dist.get_rank() == 1 else None
        )
    return str(info.value)


def test_a_group_that_only_one_rank_was_given_is_refused_on_all_of_them(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 1, tmp_path / "c")
    assert len(ranks(2).run(load_with_a_group_on_one_rank, tmp_path / "c")) == 2


# --- memory ---


def load_with_other_budgets(path: Path) -> None:
    state = laid_out("ddp", 4, blank=True)
    holdfast.load(state, path, share_reads="job", memory_budget="300KB" if dist.get_rank() else "64MB")
    assert_bits(state, content(4))


def test_ranks_with_different_budgets_send_parts_that_all_can_take(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 4, tmp_path / "c")
    ranks(2).run(load_with_other_budgets, tmp_path / "c")


class CountingNumpy:
    """numpy, which counts the bytes of the buffers that it makes and that are still there."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, size: int, dtype: Any) -> np.ndarray:
        made = np.empty(size, dtype)
        weakref.finalize(made, self._count, -made.nbytes)
        self._count(made.nbytes)
        return made

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


def load_within(path: Path, budget: int, transposed: bool) -> tuple[int, int]:
    """The most bytes that buffers had at once, and what source.read was given besides."""
    state: dict[str, Any] = {
        key: value.new_zeros(value.shape[::-1]).T if transposed and value.ndim == 2 else torch.zeros_like(value)
        for key, value in content(8).items()
    }
    counting = CountingNumpy()
    with patched(cooperative_reading, "np", counting):
        holdfast.load(state, path, share_reads="job", memory_budget=budget)
    assert_bits(state, content(8))
    assert counting.now == 0
    buffers = cooperative_reading.Buffers.within(budget)
    return counting.most, buffers.ahead * buffers.reading


@pytest.mark.parametrize("budget", [256 << 10, 1 << 20, 8 << 20, 64 << 20])
@pytest.mark.parametrize("transposed", [False, True])
def test_buffers_keep_to_the_memory_budget(ranks, tmp_path, budget, transposed):
    ranks(1).run(save_as, "ddp", 8, tmp_path / "c")
    for most, reading in ranks(4).run(load_within, tmp_path / "c", budget, transposed):
        assert 0 < most <= budget - reading


# --- what goes wrong ---


def load_damaged(path: Path, verify_first: bool) -> tuple[str, str, int | None, str | None]:
    state = laid_out("ddp", 8, blank=True)
    with pytest.raises(holdfast.errors.DamagedCheckpointError) as info:
        holdfast.load(state, path, share_reads="job", verify_first=verify_first)
    changed = any(value.float().abs().sum() > 0 for value in state.values())
    assert changed != verify_first
    again = laid_out("ddp", 8, blank=True)  # the connection is as good as before
    with pytest.raises(holdfast.errors.DamagedCheckpointError):
        holdfast.load(again, path, share_reads="job")
    return str(info.value), info.value.key, info.value.rank, info.value.file


@pytest.mark.parametrize("verify_first", [False, True])
def test_damage_is_found_by_the_reader_and_named_on_all_ranks(ranks, tmp_path, verify_first):
    ranks(1).run(save_as, "ddp", 8, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("data-*")
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        old = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([old[0] ^ 1]))
    outcomes = ranks(4).run(load_damaged, tmp_path / "c", verify_first)
    assert len(set(outcomes)) == 1
    message, key, rank, damaged = outcomes[0]
    assert key.startswith("large.")
    assert rank in range(4)
    assert f"on rank {rank}" in message
    assert Path(damaged).name == file.name
    assert ("Nothing was changed" if verify_first else "partly loaded") in message


def load_with_one_that_cannot_take_it(path: Path) -> str:
    class Full(Converted):
        def __setitem__(self, place: Any, carriers: Any) -> None:
            raise MemoryError("no memory for that")

    state = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in content(6).items()}
    with (
        patched(filling, "Converted", Full if dist.get_rank() == 2 else Converted),
        pytest.raises(MemoryError) as info,
    ):
        holdfast.load(state, path, share_reads="job", cast=True)
    holdfast.load(state, path, share_reads="job", cast=True)
    return "".join(getattr(info.value, "__notes__", []))


def test_a_receiver_that_fails_goes_on_receiving_and_then_all_fail(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 6, tmp_path / "c")
    assert all("on rank 2" in notes for notes in ranks(3).run(load_with_one_that_cannot_take_it, tmp_path / "c"))


def load_with_one_that_fails_before_an_exchange(path: Path, where: str, rank: int) -> str:
    before = getattr(CooperativeReading, where)
    calls = []

    def fails(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no memory for a message")
        return before(self, *args)

    state = laid_out("ddp", 12, blank=True)
    replacement = fails if dist.get_rank() == rank else before
    with patched(CooperativeReading, where, replacement), pytest.raises(MemoryError) as info:
        holdfast.load(state, path, share_reads="job", memory_budget="1MB")
    holdfast.load(state, path, share_reads="job")  # the connection is as good as before
    assert_bits(state, content(12))
    return "".join(getattr(info.value, "__notes__", []))


@pytest.mark.parametrize("where", ["_messages", "_inbox", "_memory_for", "_prepare", "_deliver"])
def test_a_rank_that_fails_before_an_exchange_takes_part_in_it_and_then_all_fail(ranks, tmp_path, where):
    ranks(1).run(save_as, "ddp", 12, tmp_path / "c")
    found = ranks(3).run(load_with_one_that_fails_before_an_exchange, tmp_path / "c", where, 1, group_timeout=30)
    assert all("on rank 1" in notes for notes in found)


def load_interrupted(path: Path) -> str:
    before = CooperativeReading._prepare

    def interrupts(self: Any, batch: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return before(self, batch)

    try:
        with patched(CooperativeReading, "_prepare", interrupts):
            holdfast.load(laid_out("ddp", 8, blank=True), path, share_reads="job")
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_an_interrupt_ends_the_load_on_all_ranks(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 8, tmp_path / "c")
    found = ranks(3).run(load_interrupted, tmp_path / "c")
    assert found == ["RankLeftError", "KeyboardInterrupt", "RankLeftError"]


def load_and_kill(path: Path, victim: int, batch_number: int) -> str:
    if dist.get_rank() == victim:
        before = CooperativeReading._prepare
        seen = []

        def dies(self: Any, batch: Any) -> Any:
            seen.append(batch)
            if len(seen) > batch_number:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(self, batch)

        CooperativeReading._prepare = dies
    with pytest.raises(holdfast.errors.HoldfastError) as info:
        holdfast.load(laid_out("ddp", 12, blank=True), path, share_reads="job")
    return str(info.value)


@pytest.mark.parametrize("batch_number", [0, 1])
def test_nobody_waits_for_a_reader_that_is_killed(many, tmp_path, batch_number):
    many(1).run(save_as, "ddp", 12, tmp_path / "c")
    outcomes = many(4).run_raw(load_and_kill, tmp_path / "c", 1, batch_number, group_timeout=20, deadline=120)
    assert outcomes[1].error is not None
    assert outcomes[1].error.type_name == "RankDied"
    for rank in (0, 2, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert "rank 1" in outcomes[rank].value


def load_with_another_plan_on_one_rank(path: Path) -> tuple[int, str]:
    before = read_division.plan_shared_reads

    def another(source: Any, wants: Any, rank: int, part: int) -> Any:
        return before(source, wants, rank, part // 2 if rank == 2 else part)

    state = laid_out("ddp", 4, blank=True)
    with patched(read_division, "plan_shared_reads", another), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = holdfast.load(state, path, share_reads="job")
    assert_bits(state, content(4))
    return report.bytes_received, "".join(str(each.message) for each in caught)


def test_ranks_that_come_to_different_plans_read_for_themselves_and_say_so(ranks, tmp_path):
    ranks(1).run(save_as, "ddp", 4, tmp_path / "c")
    for received, warning in ranks(3).run(load_with_another_plan_on_one_rank, tmp_path / "c"):
        assert received == 0
        assert "different plans" in warning
        assert "rank(s) 0, 1; rank(s) 2" in warning


def test_a_layout_with_nothing_to_share_is_read_directly(ranks, tmp_path):
    ranks(2).run(save_large_shards, tmp_path / "c")
    assert ranks(2).run(load_large_shards, tmp_path / "c") == [[True, False]] * 2


def save_large_shards(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    holdfast.save({"w": dtensor_of(torch.randn(8, 1 << 18), mesh, [Shard(0)])}, path)


def load_large_shards(path: Path) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    before = ReadDivision.read

    def noted(self: ReadDivision, **options: Any) -> Any:
        found.append(self.together is None)
        return before(self, **options)

    with patched(ReadDivision, "read", noted):
        holdfast.load({"w": dtensor_of(torch.zeros(8, 1 << 18), mesh, [Shard(0)])}, path, share_reads="job")
        holdfast.load({"w": torch.zeros(8, 1 << 18)}, path, share_reads="job")
    return found


def test_a_wrong_mode_is_refused(tmp_path):
    holdfast.save({"a": 1}, tmp_path / "c")
    with pytest.raises(ValueError, match="share_reads must be 'auto', 'job', 'machine' or 'off', not 'yes'"):
        holdfast.load({"a": 0}, tmp_path / "c", share_reads="yes")
