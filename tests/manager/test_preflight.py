"""The preflight: it finds what would make saves fail, on every rank and all at once, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._background import writer_process
from holdfast._manager import preflight
from holdfast._manager.measuring import (
    checkpoint_size,
    measure_copies,
    measure_writes,
    memory_limits,
    shortages,
)
from holdfast._manager.preflight import run_preflight
from holdfast._manager.preflight_report import PreflightReport, Problem
from holdfast._manager.probing import find_unshared_disks
from holdfast._ranks.shared_steps import Collectives
from holdfast._save.options import CheckedOptions
from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.roots import LocalRoot
from holdfast._stores.store import Store
from holdfast.errors import PreflightError
from tests.manager.small_disks import small_disk
from tests.properties import examples
from tests.rank_pool import RankPool

NOBODY = 65534
MB = 1 << 20

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact speeds matter to users, and are tested by themselves."""
    monkeypatch.setattr(preflight, "_PATIENCE", 0.02)


def weights(megabytes: float = 0.1) -> dict[str, Any]:
    return {"w": torch.ones(int(megabytes * MB) // 4)}


def problems_of(state: Any, root: Any, **options: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """What is wrong, which is something."""
    with pytest.raises(PreflightError) as raised:
        run_preflight(state, root, **options)
    error = raised.value
    assert error.problems == error.report.problems
    assert all(str(problem) in str(error) for problem in error.problems), "all at once"
    return [(problem.check, problem.ranks, problem.text) for problem in error.problems]


# --- one process -----------------------------------------------------------------------------------------------------


def test_all_is_well_and_nothing_is_left(tmp_path):
    report = run_preflight(weights(), tmp_path / "new" / "run", kept=3)
    assert report.problems == ()
    assert (report.path, report.world_size, report.tensor_count) == (str(tmp_path / "new" / "run"), 1, 1)
    assert report.needed_bytes == 4 * report.checkpoint_bytes
    assert report.free_bytes > report.needed_bytes
    assert report.write_rate > 0
    assert report.stall_seconds == report.save_seconds > 0
    assert (report.copy_rate, report.writer_seconds) == (None, None)
    assert os.listdir(tmp_path / "new" / "run") == []


def test_what_is_at_the_place_stays_as_it_is(tmp_path):
    holdfast.save(weights(), tmp_path / "step-1")
    (tmp_path / "notes.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    run_preflight(weights(), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_training_stands_still_for_a_copy_only_if_saves_go_on_in_the_background(tmp_path):
    report = run_preflight(weights(4), tmp_path, async_save=True)
    assert report.copy_rate > 0
    assert 4 * MB / report.copy_rate <= report.stall_seconds < report.save_seconds
    assert report.memory_needed == 4 * MB + (64 << 20)


def test_the_writer_process_is_started_and_kept_for_the_first_save(tmp_path):
    writer_process.close_idle_writers()
    report = run_preflight(weights(), tmp_path, async_save=True, writer="process")
    assert report.writer_seconds > 0
    (writer,) = writer_process._idle
    assert writer.pid is not None
    os.kill(writer.pid, 0)
    writer_process.close_idle_writers()


def test_a_writer_process_that_does_not_start_is_a_problem(tmp_path, monkeypatch):
    writer_process.close_idle_writers()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ((check, _, text),) = problems_of(weights(), tmp_path, async_save=True, writer="process")
    assert check == "writer"
    assert "ended with exit code 1" in text
    assert os.listdir(tmp_path) == []


def test_a_writer_process_cannot_save_into_the_memory_of_the_program():
    ((check, _, text),) = problems_of(weights(), "memory://preflight", async_save=True, writer="process")
    assert check == "writer"
    assert "memory://preflight" in text
    assert run_preflight(weights(), "memory://preflight", async_save=True).problems == ()


def test_a_state_that_cannot_be_saved_is_a_problem_and_the_rest_is_checked_too(tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = problems_of({"bad": object(), "worse": torch.eye(2).to_sparse()}, tmp_path / "file")
    assert [check for check, _, _ in found] == ["state", "write"]
    assert "bad" in found[0][2]
    assert str(tmp_path / "file") in found[1][2]


def test_a_place_that_is_none_is_a_problem():
    assert [check for check, _, _ in problems_of(weights(), "carrier-pigeon://loft")] == ["path"]


def test_options_of_the_save_count(tmp_path):
    state = {"keep": torch.ones(MB), "drop": torch.ones(MB)}
    chosen = CheckedOptions.of({"include": "keep", "cast": {"*": torch.bfloat16}})
    report = run_preflight(state, tmp_path, options=lambda: chosen, async_save=True)
    assert report.tensor_count == 1
    assert 2 * MB < report.checkpoint_bytes < 2.1 * MB
    assert report.memory_needed == 4 * MB + (64 << 20), "copies are made before dtypes are changed"


# --- space -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as folder:
        yield folder


def test_space_is_needed_for_all_that_are_kept_and_one_more(disk):
    assert run_preflight(weights(2), disk, kept=2).problems == ()
    ((check, _, text),) = problems_of(weights(2), disk, kept=3)
    assert check == "space"
    assert "3 stay while one more is written" in text
    assert f"({LocalRoot(disk).free_bytes():,} bytes) free" in text


def test_space_that_old_checkpoints_of_the_run_give_back_counts(disk):
    saved = holdfast.save(weights(2), disk / "step-1")
    assert problems_of(weights(2), disk, kept=3)[0][0] == "space"
    assert run_preflight(weights(2), disk, kept=2, stored_bytes=lambda: saved.bytes_written).problems == ()
    assert problems_of(weights(7), disk, kept=1, stored_bytes=lambda: 100 * MB)[0][0] == "space", (
        "it comes before they go"
    )


def test_without_retention_one_checkpoint_has_to_fit(disk):
    assert run_preflight(weights(5), disk, kept=None).problems == ()
    assert problems_of(weights(9), disk, kept=None)[0][0] == "space"


def test_a_disk_that_is_nearly_full_is_not_filled_by_the_measurement(disk):
    (disk / "others").write_bytes(bytes(6 * MB))
    assert [check for check, _, _ in problems_of(weights(5), disk)] == ["space"]
    (disk / "others").write_bytes(bytes(8 * MB - 4096))
    assert {check for check, _, _ in problems_of(weights(5), disk)} == {"write", "space"}
    assert os.listdir(disk) == ["others"]


STATES = [
    {"w": torch.ones(1000, 1000)},
    {f"layer.{number}": torch.ones(10) for number in range(300)},
    {"model": torch.nn.Linear(300, 300), "a": np.ones((100, 100)), "text": "x" * 100_000},
    {"tied": (tensor := torch.ones(50_000)), "again": tensor},
]


@pytest.mark.parametrize("state", STATES, ids=["large", "small", "mixed", "tied"])
def test_the_size_is_that_of_the_checkpoint(tmp_path, state):
    size = checkpoint_size(state, Collectives(None, False, 0))
    report = holdfast.save(state, tmp_path / "x")
    real = sum(path.stat().st_size for path in (tmp_path / "x").iterdir())
    assert abs(size.nbytes - real) < 0.05 * real + 16_384
    assert size.tensor_count == report.tensor_count


@settings(max_examples=examples(30))
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
)
def test_the_bytes_to_write_and_to_copy_are_those_of_the_tensors(shapes, dtype):
    state = {str(number): torch.zeros(shape, dtype=dtype) for number, shape in enumerate(shapes)}
    size = checkpoint_size(state, Collectives(None, False, 0))
    expected = sum(tensor.nbytes for tensor in state.values())
    assert (list(size.written), list(size.copied)) == ([expected], [expected])


# --- memory ----------------------------------------------------------------------------------------------------------


def make_system(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:    1000 kB\n", "proc/sys/kernel/random/boot_id": "b\n"}


def test_the_machine_has_what_is_available_and_not_only_what_is_free(tmp_path):
    (limit,) = memory_limits(make_system(tmp_path, MACHINE))
    assert limit.available == 1_024_000


def test_every_cgroup_above_this_process_may_have_a_limit(tmp_path):
    system = make_system(
        tmp_path,
        {
            **MACHINE,
            "proc/self/cgroup": "0::/job/task\n",
            "sys/fs/cgroup/job/memory.max": "5000\n",
            "sys/fs/cgroup/job/memory.current": "3000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 10\ninactive_file 700\nactive_file 9\n",
            "sys/fs/cgroup/job/task/memory.max": "max\n",
            "sys/fs/cgroup/job/task/memory.current": "2000\n",
        },
    )
    assert [limit.available for limit in memory_limits(system)] == [1_024_000, 2700]
    assert memory_limits(system)[1].source.endswith("cgroup/job")


def test_cgroups_of_the_first_version_count_too_and_their_huge_number_is_no_limit(tmp_path):
    files = {
        **MACHINE,
        "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 200\n",
    }
    assert [limit.available for limit in memory_limits(make_system(tmp_path, files))] == [1_024_000, 0]


def test_in_a_container_the_limit_is_at_the_top(tmp_path):
    files = {
        **MACHINE,
        "proc/self/cgroup": "0::/outside/of/this/container\n",
        "sys/fs/cgroup/memory.max": "5000\n",
        "sys/fs/cgroup/memory.current": "1000\n",
    }
    assert [limit.available for limit in memory_limits(make_system(tmp_path, files))] == [1_024_000, 4000]


def test_a_system_that_tells_nothing_has_no_known_limit(tmp_path):
    assert memory_limits(tmp_path) == []


def test_a_copy_that_does_not_fit_into_memory_is_a_problem(tmp_path, monkeypatch):
    system = make_system(tmp_path / "system", {**MACHINE, "proc/meminfo": f"MemAvailable: {70 * 1024} kB\n"})
    monkeypatch.setattr(preflight, "memory_limits", lambda: memory_limits(system))
    assert run_preflight(weights(10), tmp_path / "run").problems == ()
    ((check, ranks, text),) = problems_of(weights(10), tmp_path / "run", async_save=True)
    assert (check, ranks) == ("memory", (0,))
    assert f"{74 * MB:,} bytes" in text
    assert f"{70 * MB:,} bytes" in text
    assert run_preflight(weights(5), tmp_path / "run", async_save=True).problems == ()
    assert problems_of(weights(5), tmp_path / "run", async_save=True, copies=2)[0][0] == "memory"


def test_a_memory_budget_that_background_saves_will_refuse_is_reported_before(tmp_path):
    ((check, _, text),) = problems_of(weights(2), tmp_path, async_save=True, memory_budget=2 * MB)
    assert check == "memory"
    assert f"{2 * MB + (256 << 10):,}" in text
    assert run_preflight(weights(2), tmp_path, async_save=True, memory_budget=2 * MB + (256 << 10)).problems == ()


def test_ranks_of_one_machine_share_its_memory(tmp_path):
    """Those of another have their own."""
    mine = memory_limits(make_system(tmp_path / "a", MACHINE))
    other = memory_limits(make_system(tmp_path / "b", {**MACHINE, "proc/sys/kernel/random/boot_id": "c"}))
    half = 600_000
    assert shortages([half, half], [mine, other]) == []
    assert [(ranks, together) for _, ranks, together in shortages([half] * 3, [mine, other, mine])] == [
        ((0, 2), 2 * half)
    ]


# --- stores that are not what they seem ------------------------------------------------------------------------------


class OddStore(LocalStore):
    """Fails in one way."""

    fault = ""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        content = super().read(name, begin, end)
        is_final = name != "record" or content.count(b"was here") == 2
        return content[::-1] if self.fault == name.split("-")[0] and is_final else content

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        if self.fault == "commit" and replaces is not None:
            raise OSError(errno.EOPNOTSUPP, "cannot replace", name)
        super().commit(name, content, replaces=replaces)

    def delete(self, names: Any) -> None:
        names = list(names)
        super().delete(names)
        if self.fault == "delete" and any(name.startswith("rank") for name in names):
            raise PermissionError(errno.EACCES, "may not delete", names[0])


class OddRoot(LocalRoot):
    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(path)
        self.fault = fault

    def child(self, name: str) -> Store:
        store = OddStore(self.folder / name)
        store.fault = self.fault
        return store


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rank", "does not hold what was written"),
        ("record", "does not hold what was committed"),
        ("commit", "could not be committed: OSError: [Errno 95] cannot replace"),
        ("delete", "cannot be deleted: PermissionError: [Errno 13] may not delete"),
    ],
)
def test_everything_that_a_save_does_is_tried(tmp_path, fault, text):
    ((check, _, found),) = problems_of(weights(), OddRoot(tmp_path, fault))
    assert check == "write"
    assert text in found
    assert os.listdir(tmp_path) == []


# --- measurements ----------------------------------------------------------------------------------------------------


class SlowStore(MemoryStore):
    """Time passes by writing only: a moment for every object, and some for every byte."""

    def __init__(self, name: str, seconds: float, rate: float) -> None:
        super().__init__(name)
        self.now = 0.0
        self.seconds = seconds
        self.rate = rate
        self.sizes: list[int] = []

    @contextmanager
    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Iterator[Any]:
        with super().create(name, size, memory) as sink:
            yield sink
            self.sizes.append(len(sink.content))
            self.now += self.seconds + len(sink.content) / self.rate


@settings(max_examples=examples(50))
@given(rate=st.floats(1e4, 1e11), seconds=st.floats(0, 0.5))
def test_a_disk_is_measured_within_the_time_there_is(rate, seconds):
    store = SlowStore("slow", seconds, rate)
    speed = measure_writes(store, "object", patience=0.4, most=4 * MB, clock=lambda: store.now)
    first, last = store.sizes[0], store.sizes[-1]
    assert speed.overhead == pytest.approx(seconds + first / rate)
    assert store.now <= max(speed.overhead, 1.0)
    by_size = last / rate / (seconds + last / rate)
    if last > first and by_size > 0.2:
        assert speed.rate == pytest.approx(rate, rel=1e-3)
    elif last > first:
        assert speed.rate <= 10 * last / (seconds + last / rate), "no wild guesses"
    else:
        assert speed.rate == pytest.approx(first / speed.overhead)
    assert store.list() == []


def test_no_more_is_written_than_there_is_room_for():
    store = SlowStore("small", 0, 1e12)
    measure_writes(store, "object", patience=1.0, most=5 * MB, clock=lambda: store.now)
    assert store.sizes == [MB // 16, MB // 4, MB, 4 * MB]
    measure_writes(store, "object", patience=1.0, most=0, clock=lambda: store.now)
    assert store.sizes[4:] == [MB // 16]


def test_the_speed_of_copies_is_that_of_the_clock():
    times = iter(range(100))

    def speed(*tensors: torch.Tensor) -> float | None:
        return measure_copies(tensors, patience=2.0, clock=lambda: next(times))

    assert speed(torch.ones(10), torch.ones(1000)) == 4000
    assert next(times) == 6, "three times a second, and no more"
    assert speed(torch.ones(3, 5).T) == 60
    assert speed() is None
    assert speed(torch.ones(0)) is None


# --- several ranks ---------------------------------------------------------------------------------------------------


def find_problems(root: Any, state: Any = None, **options: Any) -> Any:
    """What is wrong, or the report; then the ranks save something together, with success."""
    try:
        found: Any = run_preflight(weights() if state is None else state, root, **options)
    except PreflightError as error:
        found = pickle.loads(pickle.dumps(error)).problems
    ranks_can_go_on = torch.tensor([1])
    dist.all_reduce(ranks_can_go_on)
    assert ranks_can_go_on == dist.get_world_size()
    return found


def sharded_and_replicated(root: Path) -> PreflightReport:
    own = holdfast.PerRank(torch.ones(MB // 4))
    return find_problems(root, {"own": own, "same": torch.ones(MB // 2)}, kept=2, async_save=True)


def test_all_ranks_get_the_same_report(ranks: RankPool, tmp_path):
    reports = ranks(3).run(sharded_and_replicated, tmp_path)
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].world_size == 3
    assert 5 * MB < reports[0].checkpoint_bytes < 5.1 * MB, "what all have is stored once"
    assert reports[0].memory_needed == 3 * MB + (64 << 20)
    assert os.listdir(tmp_path) == []


def elsewhere_on(rank: int, folder: Path) -> Any:
    """The same path for all, which leads to another folder on one rank."""
    before = os.getcwd()
    os.chdir(folder / ("other" if dist.get_rank() == rank else "common"))
    try:
        return find_problems("/proc/self/cwd/run")
    finally:
        os.chdir(before)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="such a path is to be had on Linux")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_whose_disk_is_not_shared_is_named(ranks: RankPool, tmp_path, rank):
    (tmp_path / "other").mkdir()
    (tmp_path / "common").mkdir()
    outcomes = ranks(3).run(elsewhere_on, rank, tmp_path)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (problem,) = outcomes[0]
    assert (problem.check, problem.ranks) == ("shared", (rank,))
    assert problem.text.startswith(f"rank {rank} cannot see what ranks ")
    assert "/proc/self/cwd/run" in problem.text
    for folder in ("other", "common"):
        assert os.listdir(tmp_path / folder / "run") == []


def own_path_on(rank: int, folder: Path) -> Any:
    return find_problems(folder / ("other" if dist.get_rank() == rank else "common"))


def test_a_rank_that_was_given_another_path_is_named(ranks: RankPool, tmp_path):
    outcomes = ranks(3).run(own_path_on, 2, tmp_path)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (problem,) = outcomes[0]
    assert (problem.check, problem.ranks) == ("path", (2,))
    assert str(tmp_path / "other") in problem.text
    assert str(tmp_path / "common") in problem.text


def in_memory() -> Any:
    return find_problems("memory://run")


def test_the_memory_of_a_process_is_not_shared(ranks: RankPool):
    (problem,) = ranks(2).run(in_memory)[0]
    assert (problem.check, problem.ranks) == ("shared", (1,))


def open_to_everybody(folder: Path) -> None:
    """The folders of the tests are closed to other users, from the first one that pytest made."""
    for closed in (folder, *takewhile(lambda parent: parent.name.startswith(("pytest-", "popen-")), folder.parents)):
        closed.chmod(0o755)


@contextmanager
def as_nobody(is_nobody: bool) -> Iterator[None]:
    if is_nobody:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_nobody:
            os.seteuid(0)


def without_rights(rank: int, folder: Path) -> Any:
    with as_nobody(dist.get_rank() == rank):
        return find_problems(folder)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_rank_without_permission_is_named(ranks: RankPool, tmp_path, mode):
    open_to_everybody(tmp_path)
    (tmp_path / "run").mkdir(mode=mode)
    outcomes = ranks(3).run(without_rights, 1, tmp_path / "run")
    assert outcomes[0] == outcomes[1] == outcomes[2]
    (problem,) = outcomes[0]
    assert (problem.check, problem.ranks) == ("write", (1,))
    assert "PermissionError" in problem.text
    assert str(tmp_path / "run") in problem.text
    assert os.listdir(tmp_path / "run") == []


def everything_at_once(folder: Path) -> Any:
    rank = dist.get_rank()
    state = {**weights(3), "own": holdfast.PerRank(torch.ones(10))}
    root = folder.parent / "other" if rank == 2 else folder
    with as_nobody(rank == 1):
        return find_problems(root, state, kept=9, async_save=True, memory_budget=MB)


@as_root
def test_all_problems_of_all_ranks_are_reported_at_once(ranks: RankPool, tmp_path, disk):
    open_to_everybody(tmp_path)
    disk.chmod(0o755)
    outcomes = ranks(3).run(everything_at_once, disk)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [(problem.check, problem.ranks) for problem in outcomes[0]] == [
        ("write", (1,)),
        ("path", (2,)),
        ("space", (0, 1)),
        ("memory", (0, 1, 2)),
    ]


def bad_state_on(rank: int, folder: Path) -> Any:
    state: dict[str, Any] = weights()
    if dist.get_rank() == rank:
        state["bad"] = object()
    return find_problems(folder, state)


def test_a_rank_whose_state_cannot_be_saved_is_named(ranks: RankPool, tmp_path):
    outcomes = ranks(2).run(bad_state_on, 1, tmp_path)
    assert outcomes[0] == outcomes[1]
    assert [(problem.check, problem.ranks) for problem in outcomes[0]] == [("state", (1,))]
    assert outcomes[0][0].text.startswith("rank 1: ")


def other_shape_on(rank: int, folder: Path) -> Any:
    return find_problems(folder, {"w": torch.ones(3 if dist.get_rank() == rank else 4)})


def test_parts_of_a_state_that_do_not_fit_are_a_problem(ranks: RankPool, tmp_path):
    outcomes = ranks(2).run(other_shape_on, 1, tmp_path)
    assert outcomes[0] == outcomes[1]
    (problem,) = outcomes[0]
    assert (problem.check, problem.ranks) == ("state", (0, 1))
    assert "'w'" in problem.text


def interrupt_on(rank: int, folder: Path) -> str:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    if dist.get_rank() == rank:
        preflight.memory_limits = interrupted
    try:
        run_preflight(weights(), folder)
    except BaseException as error:
        return type(error).__name__
    finally:
        preflight.memory_limits = memory_limits
    return ""


def test_a_preflight_that_is_interrupted_ends_on_all_ranks_and_its_objects_are_gone(ranks: RankPool, tmp_path):
    assert ranks(3).run(interrupt_on, 1, tmp_path) == ["RankLeftError", "KeyboardInterrupt", "RankLeftError"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# --- putting it together ---------------------------------------------------------------------------------------------


def test_most_ranks_are_right_about_what_is_shared():
    def named(*seen: set[int]) -> list[tuple[int, ...]]:
        return [problem.ranks for problem in find_unshared_disks("/run", dict(enumerate(map(frozenset, seen))))]

    assert named({0, 1}, {0, 1}) == []
    assert named({0}, {1, 2}, {1, 2}) == [(0,)]
    assert named({0, 1}, {0, 1}, {2, 3}, {2, 3}) == [(2, 3)]
    assert named({0}, {1}, {2}) == [(1,), (2,)]
    assert named({0, 1}, {0, 1, 2}, {0, 1, 2}) == [(0,)]
    assert named({0, 1}, {0, 1}, {0, 1, 2}) == [(2,)], "it can be read by nobody but itself"
    assert list(find_unshared_disks("/run", {})) == []


def test_the_report_reads_well():
    report = PreflightReport(
        path="/run", world_size=4, is_async=True, problems=(Problem("space", (0,), "no room."),), tensor_count=310,
        checkpoint_bytes=2_200_000_000, kept=3, needed_bytes=8_800_000_000, free_bytes=61_000_000_000,
        memory_needed=600_000_000, memory_available=9_000_000_000, write_rate=1.2e9, copy_rate=8e9,
        stall_seconds=0.069, save_seconds=1.91, writer_seconds=2.13,
    )  # fmt: skip
    assert str(report).splitlines() == [
        "preflight for /run on 4 ranks: 1 problem",
        "  1. no room.",
        "  a checkpoint has 2.2 GB in 310 tensors, and 27 of them fit into the 61.0 GB that are free",
        "  a save takes up to 600.0 MB of memory on a rank of 9.0 GB that are left",
        "  measured: 1.2 GB/s to the disk, durable; 8.0 GB/s from memory to memory",
        "  estimate: committed after 1.91 s; training pauses for 69 ms",
        "  the writer process started in 2.1 s",
    ]


# --- through a manager -----------------------------------------------------------------------------------------------


def managed_problems(root: Any, state: Any = None, **options: Any) -> Any:
    """What a manager that is not open yet finds."""
    manager = holdfast.CheckpointManager(root, **options)
    try:
        with pytest.raises(PreflightError) as raised:
            manager.preflight(weights() if state is None else state)
    finally:
        manager.close()
    return [(problem.check, problem.ranks) for problem in pickle.loads(pickle.dumps(raised.value)).problems]


def managed_elsewhere(folder: Path) -> Any:
    before = os.getcwd()
    os.chdir(folder / str(dist.get_rank()))
    try:
        return managed_problems("/proc/self/cwd/run", keep_last=2)
    finally:
        os.chdir(before)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="such a path is to be had on Linux")
def test_a_disk_that_is_not_shared_is_reported_also_if_one_machine_has_older_steps(ranks: RankPool, tmp_path):
    for rank in range(2):
        with holdfast.CheckpointManager(tmp_path / str(rank) / "run", save_at_end=False) as manager:
            for step in range(rank):
                manager.save(step, weights(), wait=True)
    assert ranks(2).run(managed_elsewhere, tmp_path) == [[("shared", (1,))]] * 2


def managed_without_rights(folder: Path) -> Any:
    rank = dist.get_rank()
    with as_nobody(True):
        return managed_problems(folder, {"bad": object()} if rank == 1 else None)


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_run_that_cannot_be_opened_is_reported_with_all_other_problems(ranks: RankPool, tmp_path, mode):
    open_to_everybody(tmp_path)
    (tmp_path / "run").mkdir(mode=mode)
    found = ranks(2).run(managed_without_rights, tmp_path / "run")
    assert found[0] == found[1]
    assert [problem for problem in found[0] if problem[0] != "path"] == [
        ("write", (0,)),
        ("state", (1,)),
        ("write", (1,)),
    ]
    assert os.listdir(tmp_path / "run") == []


def managed_with_rights_on_the_first(folder: Path) -> Any:
    with as_nobody(dist.get_rank() == 1):
        return managed_problems(folder)


@as_root
def test_a_rank_that_cannot_even_list_the_steps_keeps_nobody_waiting(ranks: RankPool, tmp_path):
    open_to_everybody(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    assert ranks(2).run(managed_with_rights_on_the_first, tmp_path / "run") == [[("write", (1,))]] * 2


def managed_at_different_paths(folder: Path) -> Any:
    return managed_problems(folder / str(dist.get_rank()))


def test_a_manager_that_was_given_another_path_is_named(ranks: RankPool, tmp_path):
    assert ranks(2).run(managed_at_different_paths, tmp_path) == [[("path", (1,))]] * 2


def managed_with_other_parts(folder: Path) -> Any:
    return managed_problems(
        folder, {"x": 1} if dist.get_rank() == 1 else {"model": 1}, run_options=holdfast.RunOptions(parts=["model"])
    )


def test_a_rank_with_other_parts_is_named(ranks: RankPool, tmp_path):
    assert ranks(2).run(managed_with_other_parts, tmp_path) == [[("state", (1,))]] * 2


def test_a_file_in_the_place_of_a_run_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert ("write", (0,)) in managed_problems(tmp_path / "file" / "run")


def test_a_run_that_cannot_be_opened_for_another_reason_is_that_error(tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(holdfast.CheckpointManager, "_claim", fail)
    with pytest.raises(OSError, match="Input/output error"):
        holdfast.CheckpointManager(tmp_path).preflight(weights())
    assert os.listdir(tmp_path) == []
