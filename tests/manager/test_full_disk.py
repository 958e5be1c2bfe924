"""A full disk: the last good checkpoint stays, nothing else is left, and what happens next is what was asked for."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import holdfast
from holdfast._manager.full_disk import WhenFull, is_full, next_to_go, save_despite_full_disk
from holdfast._manager.measuring import checkpoint_size
from holdfast._manager.options import OnFullDisk
from holdfast._ranks.failures import wrap_exception
from holdfast._ranks.meeting import meeting
from holdfast._ranks.shared_steps import Collectives
from holdfast._save.async_save import How, begin_save
from holdfast._save.options import CheckedOptions
from holdfast._save.pending import PendingSave
from holdfast._stores.roots import LocalRoot
from holdfast.errors import CheckpointException, StorageFullError
from tests.manager.small_disks import FullForData, find_no_space, small_disk
from tests.rank_pool import RankPool

MB = 1 << 20


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as folder:
        yield folder


def state_of(megabytes: int, value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((megabytes * MB // 4,), float(value))}


def value_at(path: Path) -> float:
    loaded = holdfast.open(path).read()["w"]
    assert (loaded == loaded[0]).all()
    return float(loaded[0])


def save_step(
    root: Path, name: str, state: Any, when_full: WhenFull, options: dict[str, Any] | None = None
) -> holdfast.SaveReport:
    """As a run saves: into a folder of its root, with what it takes to say how much is needed."""
    place = LocalRoot(root)
    complete = WhenFull(
        **{
            **vars(when_full),
            "free_bytes": place.free_bytes,
            "clean_up": lambda: place.remove(name) and None,
        }
    )
    return save_despite_full_disk(
        lambda: holdfast.save(state, root / name, **(options or {})),
        str(root / name),
        complete,
        needed=lambda ranks: checkpoint_size(state, ranks).nbytes,
    )


# --- on a disk of eight megabytes ------------------------------------------------------------------------------------


def test_the_last_good_checkpoint_stays_and_the_error_tells_how_much_is_missing(disk):
    holdfast.save(state_of(4, 7.0), disk / "step-1")
    free = shutil.disk_usage(disk).free
    with pytest.raises(StorageFullError) as raised:
        save_step(disk, "step-2", state_of(6), WhenFull("error"))
    error = raised.value
    assert (error.path, error.rank, error.ranks, error.deleted) == (str(disk / "step-2"), 0, [0], [])
    assert error.free == free
    assert 6 * MB < error.needed < 6.1 * MB
    assert all(f"{number:,} bytes" in str(error) for number in (error.needed, error.free))
    assert f"{disk}/step-2/data-" in str(error)
    assert "choose OnFullDisk(action='prune') or 'wait'" in str(error)
    assert value_at(disk / "step-1") == 7.0
    assert os.listdir(disk) == ["step-1"]


def test_programs_that_look_for_a_full_disk_find_it(disk):
    with pytest.raises(OSError, match="no space for") as raised:
        save_step(disk, "step-1", state_of(10), WhenFull("error"))
    assert raised.value.errno == errno.ENOSPC
    assert is_full(raised.value)
    assert isinstance(raised.value.__cause__, OSError)


@dataclass(frozen=True)
class Step:
    step: int
    pinned: bool = False
    set_aside: str | None = None
    is_ours: bool = True


def pruner(root: Path, pinned: set[int] = frozenset()) -> Callable[[], str | None]:
    """Deletes as a run does."""

    def prune() -> str | None:
        numbers = [int(name.removeprefix("step-")) for name in os.listdir(root) if name.startswith("step-")]
        chosen = next_to_go([Step(number, pinned=number in pinned) for number in numbers])
        if chosen is None:
            return None
        shutil.rmtree(root / f"step-{chosen.step}")
        return f"step-{chosen.step}"

    return prune


def test_pruning_deletes_the_oldest_until_the_new_one_fits_and_no_more(disk):
    for number in (1, 2, 3):
        holdfast.save(state_of(2, number), disk / f"step-{number}")
    save_step(disk, "step-4", state_of(3, 4.0), WhenFull("prune", prune=pruner(disk)))
    assert sorted(os.listdir(disk)) == ["step-2", "step-3", "step-4"]
    assert [value_at(disk / f"step-{number}") for number in (2, 3, 4)] == [2, 3, 4]


def test_pruning_leaves_pinned_ones_alone_and_takes_several_if_it_has_to(disk):
    for number in (1, 2, 3, 4):
        holdfast.save(state_of(1, number), disk / f"step-{number}")
    attempts = []

    def save() -> holdfast.SaveReport:
        attempts.append(sorted(os.listdir(disk)))
        return holdfast.save(state_of(5, 5.0), disk / "step-5")

    when_full = WhenFull("prune", prune=pruner(disk, {2}), free_bytes=LocalRoot(disk).free_bytes)
    size = checkpoint_size(state_of(5), Collectives(None, False, 0)).nbytes
    save_despite_full_disk(save, str(disk / "step-5"), when_full, needed=lambda ranks: size)
    assert sorted(os.listdir(disk)) == ["step-2", "step-4", "step-5"]
    assert len(attempts) == 2, "nothing was written while it was known that it would not fit"


def test_pruning_never_takes_the_newest_and_says_so(disk):
    holdfast.save(state_of(1, 1.0), disk / "step-1")
    holdfast.save(state_of(4, 2.0), disk / "step-2")
    with pytest.raises(StorageFullError, match="no checkpoint left that may be deleted") as raised:
        save_step(disk, "step-3", state_of(6), WhenFull("prune", prune=pruner(disk)))
    assert raised.value.deleted == ["step-1"]
    assert "Deleted to make space: step-1" in str(raised.value)
    assert os.listdir(disk) == ["step-2"]
    assert value_at(disk / "step-2") == 2.0


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self.on_nap: Callable[[int], None] = lambda nap: None

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds
        self.on_nap(len(self.naps))

    def waiting(self, seconds: float) -> WhenFull:
        return WhenFull("wait", wait_seconds=seconds, poll_seconds=4.0, clock=lambda: self.now, sleep=self.sleep)


def test_waiting_saves_as_soon_as_there_is_room(disk):
    (disk / "somebody's").write_bytes(bytes(6 * MB))
    clock = Clock()
    clock.on_nap = lambda nap: (disk / "somebody's").unlink() if nap == 3 else None
    save_step(disk, "step-1", state_of(4, 3.0), clock.waiting(60))
    assert clock.naps == [4.0, 4.0, 4.0]
    assert value_at(disk / "step-1") == 3.0


def test_waiting_writes_nothing_before_there_is_room(disk, caplog):
    (disk / "somebody's").write_bytes(bytes(6 * MB))
    clock, attempts = Clock(), []

    def save() -> None:
        attempts.append(clock.now)
        holdfast.save(state_of(4), disk / "step-1")

    when_full = WhenFull(**{**vars(clock.waiting(10)), "free_bytes": LocalRoot(disk).free_bytes})
    with pytest.raises(StorageFullError, match="No space was freed within 10 s") as raised:
        save_despite_full_disk(save, "step-1", when_full, needed=lambda ranks: 4 * MB)
    assert attempts == [0.0]
    assert clock.naps == [4.0, 4.0, 2.0]
    assert raised.value.needed == 4 * MB
    assert raised.value.free < 4 * MB
    assert "Waiting up to 10 s" in caplog.text


def test_nobody_waits_for_longer_than_the_program_lives():
    """That it will be ended turns out while it waits."""
    clock, end = Clock(), []
    clock.on_nap = lambda nap: end.append(11.0) if nap == 2 else None
    when_full = WhenFull(**{**vars(clock.waiting(3600)), "give_up_at": lambda: end[0] if end else None})
    with pytest.raises(StorageFullError, match="No space was freed before the program has to end"):
        save_despite_full_disk(find_no_space, "step-1", when_full)
    assert clock.naps == [4.0, 4.0, 3.0]


def test_the_deadline_of_waiting_is_that_of_the_whole_save():
    """If nobody knows how much is needed, it is tried now and then."""
    clock, attempts = Clock(), []

    def save() -> None:
        attempts.append(clock.now)
        find_no_space()

    with pytest.raises(StorageFullError):
        save_despite_full_disk(save, "step-1", clock.waiting(10))
    assert attempts == [0.0, 4.0, 8.0, 10.0]


def test_a_pause_is_never_so_long_that_other_ranks_give_this_one_up():
    clock = Clock()
    when_full = WhenFull(**{**vars(clock.waiting(3600)), "poll_seconds": 3600.0})
    with pytest.raises(StorageFullError):
        save_despite_full_disk(find_no_space, "step-1", when_full, needed=lambda ranks: None)
    assert max(clock.naps) <= 10


# --- what counts as full ---------------------------------------------------------------------------------------------


def chained(outer: BaseException, inner: BaseException, how: str) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            if how == "cause":
                raise outer from error
            outer.__context__, outer.__suppress_context__ = error, how == "hidden"
            raise outer  # noqa: B904 - the case to be looked at
    except BaseException as error:
        return error


def failed(**errors: BaseException) -> CheckpointException:
    return CheckpointException(
        "write", {int(rank.removeprefix("rank")): wrap_exception(error) for rank, error in errors.items()}
    )


def full() -> OSError:
    return OSError(errno.ENOSPC, "full")


OVER_QUOTA, BROKEN = OSError(errno.EDQUOT, "quota"), OSError(errno.EIO, "broken")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (full(), True),
        (OVER_QUOTA, True),
        (BROKEN, False),
        (OSError("no number"), False),
        (MemoryError(), False),
        (chained(RuntimeError("cannot write"), full(), "cause"), True),
        (chained(RuntimeError("cannot write"), full(), "context"), True),
        (chained(RuntimeError("cannot write"), full(), "hidden"), False),
        (chained(KeyboardInterrupt(), full(), "context"), False),
        (failed(rank1=full()), True),
        (failed(rank0=OVER_QUOTA, rank2=chained(ValueError(), full(), "cause")), True),
        (failed(rank0=full(), rank1=BROKEN), False),
        (failed(rank0=full(), rank1=KeyboardInterrupt()), False),
        (chained(full(), failed(rank1=full()), "cause"), True),
        (chained(full(), failed(rank0=full(), rank1=ValueError("other")), "cause"), False),
    ],
)
def test_only_a_disk_that_is_full_and_nothing_else_is_a_full_disk(error, expected):
    assert is_full(error) is expected


def test_errors_that_refer_to_each_other_are_looked_at_once():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert not is_full(first)


@pytest.mark.parametrize("error", [BROKEN, ValueError("no"), KeyboardInterrupt()])
def test_other_errors_go_on_as_they_are_and_nothing_is_deleted(error):
    def save() -> None:
        raise error

    def prune() -> str:
        raise AssertionError

    with pytest.raises(type(error)) as raised:
        save_despite_full_disk(save, "step-1", WhenFull("prune", prune=prune))
    assert raised.value is error


def test_what_was_saved_is_returned():
    assert save_despite_full_disk(lambda: "report", "step-1", WhenFull()) == "report"


def test_a_checkpoint_that_cannot_be_deleted_does_not_hide_the_full_disk():
    def prune() -> str:
        raise PermissionError(errno.EACCES, "not yours")

    with pytest.raises(StorageFullError, match=r"(?s)full.*could be deleted.*not yours"):
        save_despite_full_disk(find_no_space, "full", WhenFull("prune", prune=prune))


def test_leftovers_that_cannot_be_removed_does_not_hide_the_full_disk(caplog):
    def clean_up() -> None:
        raise PermissionError(errno.EACCES, "not yours")

    with pytest.raises(StorageFullError):
        save_despite_full_disk(find_no_space, "step-1", WhenFull(clean_up=clean_up))
    assert "not yours" in caplog.text


def test_a_size_that_nobody_can_tell_does_not_hide_the_full_disk():
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("no state")

        def load_state_dict(self, state: Any) -> None: ...

    def free() -> int:
        raise OSError(errno.EIO, "no idea")

    with pytest.raises(StorageFullError) as raised:
        save_despite_full_disk(
            find_no_space,
            "step-1",
            WhenFull(free_bytes=free),
            needed=lambda ranks: checkpoint_size({"a": Broken()}, ranks).nbytes,
        )
    assert (raised.value.needed, raised.value.free) == (None, None)


def test_a_wish_that_is_not_understood_is_refused_at_once():
    with pytest.raises(ValueError, match="'error', 'prune' or 'wait', not 'ignore'"):
        OnFullDisk(action="ignore")


# --- which checkpoint goes -------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.builds(
        Step, st.integers(0, 9), pinned=st.booleans(), set_aside=st.none() | st.just("damaged"), is_ours=st.booleans()
    ),
    unique_by=lambda step: step.step,
    max_size=8,
)


@example(steps=[Step(1), Step(2), Step(3), Step(4)], spare={1, 3})
@given(steps=STEPS, spare=st.sets(st.integers(0, 9)))
def test_what_must_stay_stays_however_often_something_goes(steps, spare):
    good = [step for step in steps if step.is_ours and step.set_aside is None]
    newest = max(good, key=lambda step: step.step, default=None)
    left, gone = list(steps), []
    while (chosen := next_to_go(left, spare)) is not None:
        gone.append(chosen)
        left.remove(chosen)
    assert newest is None or newest in left
    assert all(step.is_ours and not step.pinned and step.set_aside is None for step in gone)
    assert gone == sorted(gone, key=lambda step: (step.step in spare, step.step))
    assert {step.step for step in left if step in good} == {
        step.step for step in good if step.pinned or step is newest
    }, "all others go if they have to"


# --- several ranks ---------------------------------------------------------------------------------------------------


def own_state(megabytes: int) -> dict[str, Any]:
    return {"own": holdfast.PerRank(torch.full((megabytes * MB // 4,), float(dist.get_rank())))}


def outcome_of_full_disk(root: Path, megabytes: int, when_full: WhenFull | None = None) -> dict[str, Any]:
    try:
        save_step(root, "step-9", own_state(megabytes), when_full or WhenFull())
    except StorageFullError as error:
        found = dict(error.fields, message=str(error))
    else:
        found = {}
    dist.barrier()
    return found


def test_all_ranks_get_the_same_error_and_nothing_is_left(ranks: RankPool, disk):
    holdfast.save(state_of(3, 5.0), disk / "step-1")
    errors = ranks(3).run(outcome_of_full_disk, disk, 2)
    assert errors[0] == errors[1] == errors[2]
    assert errors[0]["path"] == str(disk / "step-9")
    assert set(errors[0]["ranks"]) <= {0, 1, 2}
    assert errors[0]["rank"] == errors[0]["ranks"][0]
    assert 6 * MB < errors[0]["needed"] < 6.1 * MB
    assert errors[0]["free"] == shutil.disk_usage(disk).free
    assert os.listdir(disk) == ["step-1"]
    assert value_at(disk / "step-1") == 5.0


def prune_and_count(root: Path) -> int:
    calls = []

    def prune() -> str | None:
        calls.append(1)
        return pruner(root)()

    assert outcome_of_full_disk(root, 2, WhenFull("prune", prune=prune)) == {}
    restored = own_state(2)
    restored["own"].value.zero_()
    holdfast.load(restored, root / "step-9")
    assert (restored["own"].value == dist.get_rank()).all()
    return len(calls)


def test_one_rank_prunes_for_all(ranks: RankPool, disk):
    for number in (1, 2, 3):
        holdfast.save(state_of(1, number), disk / f"step-{number}")
    assert ranks(3).run(prune_and_count, disk) == [2, 0, 0]
    assert sorted(os.listdir(disk)) == ["step-3", "step-9"]


def full_for_one(path: Path, full_rank: int) -> dict[str, Any]:
    store = FullForData(path) if dist.get_rank() == full_rank else path
    try:
        save_despite_full_disk(lambda: holdfast.save(own_state(1), store), str(path), WhenFull())
    except StorageFullError as error:
        return error.fields | {"message": str(error)}
    return {}


def test_the_rank_that_found_no_space_is_named_on_all(ranks: RankPool, tmp_path):
    errors = ranks(3).run(full_for_one, tmp_path / "step-1", 1)
    assert errors[0] == errors[1] == errors[2]
    assert (errors[0]["rank"], errors[0]["ranks"]) == (1, [1])
    assert "rank 1 failed at" in errors[0]["message"]


def wait_for_room(root: Path) -> tuple[list[float], float]:
    clock = Clock()
    clock.on_nap = lambda nap: (root / "somebody's").unlink() if nap == 2 else None
    assert outcome_of_full_disk(root, 2, clock.waiting(60)) == {}
    return clock.naps


def test_ranks_wait_by_one_clock(ranks: RankPool, disk):
    (disk / "somebody's").write_bytes(bytes(4 * MB))
    assert ranks(3).run(wait_for_room, disk) == [[4.0, 4.0], [], []]
    assert holdfast.open(disk / "step-9")


def save_within_a_call(places: list[Path]) -> tuple[int, list[str]]:
    """As in the background, where the ranks are together for the whole save."""
    attempts, deleted = [], []

    def save(ranks: Collectives) -> str:
        with ranks.step("write"):
            attempts.append(1)
            if ranks.rank == 1 and len(attempts) < 3:
                find_no_space()
        return "saved"

    def prune() -> str:
        deleted.append(str(places.pop(0)))
        return deleted[-1]

    with meeting("a save in the background") as ranks:
        when_full = WhenFull("prune", prune=prune)
        assert save_despite_full_disk(lambda: save(ranks), "step-9", when_full, ranks=ranks) == "saved"
    return len(attempts), deleted


def test_ranks_that_are_together_try_again_together(ranks: RankPool):
    names = [Path("step-1"), Path("step-2"), Path("step-3")]
    assert ranks(2).run(save_within_a_call, names) == [(3, ["step-1", "step-2"]), (3, [])]


def save_in_background(root: Path) -> tuple[int, str, str]:
    """What was written at last, and how the next save failed."""

    def begin(name: str, megabytes: int) -> PendingSave:
        place = LocalRoot(root)
        when_full = WhenFull(
            "prune", prune=pruner(root), free_bytes=place.free_bytes, clean_up=lambda: place.remove(name) and None
        )

        def attempts(ranks: Collectives, save: Callable[[], Any]) -> Any:
            return save_despite_full_disk(save, str(root / name), when_full, ranks=ranks)

        return begin_save(own_state(megabytes), root / name, CheckedOptions.of, How(attempts=attempts), None)

    saved = begin("step-8", 2).result()
    try:
        begin("step-9", 3).result()
    except Exception as error:
        return saved.bytes_written, type(error).__name__, str(error)
    return saved.bytes_written, "", ""


def test_a_save_in_the_background_makes_room_or_fails_with_the_same_error(ranks: RankPool, disk):
    for number in (1, 2):
        holdfast.save(state_of(3, number), disk / f"step-{number}")
    outcomes = ranks(2).run(save_in_background, disk)
    assert outcomes[0] == outcomes[1]
    written, kind, message = outcomes[0]
    assert written > 4 * MB
    assert kind == "StorageFullError"
    assert "Deleted to make space: step-2." in message
    assert os.listdir(disk) == ["step-8"]


def fail_alone() -> tuple[str, int]:
    """One rank fails by itself, while the others are in the middle of a step."""
    pruned: list[int] = []

    def save(ranks: Collectives) -> None:
        if ranks.rank == 1:
            find_no_space()
        ranks.all_gather("write", int)

    try:
        with meeting("a save") as ranks:
            when_full = WhenFull("prune", prune=lambda: pruned.append(1))
            save_despite_full_disk(lambda: save(ranks), "step-9", when_full, ranks=ranks)
    except Exception as error:
        return type(error).__name__, len(pruned)
    return "", 0


def test_a_rank_that_fails_by_itself_asks_nobody(ranks: RankPool):
    """The others would take its question for what they wait for."""
    found = ranks(3).run(fail_alone)
    assert found == [("RankLeftError", 0), ("OSError", 0), ("RankLeftError", 0)]
