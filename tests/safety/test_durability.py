"""What a save has written survives a power cut, and a cut in the middle of it leaves the old checkpoint or the new one.

The system calls of a save are recorded and every disk that a power cut at any moment could leave is put together and
loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.safety.checkpoints import found_in, save
from tests.safety.forked_ranks import Failure, run_on_forked_ranks
from tests.safety.power_loss import PowerCuts, write_disk
from tests.safety.syscalls import Change, require_tracing


@pytest.fixture(autouse=True, scope="module")
def _tracing() -> None:
    require_tracing()


def old_plain(checkpoint: Path) -> None:
    save(1, checkpoint)


def old_rank_by_rank(checkpoint: Path) -> None:
    save(1, checkpoint, use_collectives=False)


def new_plain(checkpoint: Path) -> None:
    save(2, checkpoint)


def new_in_many_files(checkpoint: Path) -> None:
    save(2, checkpoint, thread_count=2, single_file_per_rank=False)


def new_rank_by_rank(checkpoint: Path) -> None:
    save(2, checkpoint, use_collectives=False)


def new_without_sync(checkpoint: Path) -> None:
    save(2, checkpoint, sync_files=False)


def record(
    folder: Path, old: Callable[[Path], None] | None, new: Callable[[Path], None], world_size: int
) -> tuple[list[Change], PowerCuts]:
    """The changes of a save over an old checkpoint, and the disk as it was before."""
    checkpoint = folder / "checkpoints" / "step"
    if old is not None:
        run_on_forked_ranks(partial(old, checkpoint), world_size, below=folder)
    before = PowerCuts(folder)
    outcomes, watched = run_on_forked_ranks(partial(new, checkpoint), world_size, below=folder)
    assert not any(isinstance(outcome, Failure) for outcome in outcomes), outcomes
    return watched.changes, before


def found_on_ranks(checkpoint: Path, world_size: int) -> Any:
    """What all ranks of a job load."""
    outcomes, _ = run_on_forked_ranks(partial(found_in, checkpoint), world_size, below=checkpoint)
    return outcomes[0] if len(set(outcomes)) == 1 else f"different things on different ranks: {outcomes}"


def cut_the_power_everywhere(
    folder: Path, old: Callable[[Path], None] | None, new: Callable[[Path], None], world_size: int
) -> tuple[set[Any], set[Any]]:
    """What could be found after a cut during the save, and after a cut just after it returned."""
    disk = folder / "disk"
    disk.mkdir()
    changes, before = record(disk, old, new, world_size)
    found: dict[Any, Any] = {}
    by_rank = {old, new} & {old_rank_by_rank, new_rank_by_rank}

    def look(disks: set[Any]) -> set[Any]:
        for state in disks - found.keys():
            place = folder / f"cut-{len(found)}"
            write_disk(state, place)
            checkpoint = place / "checkpoints" / "step"
            found[state] = found_on_ranks(checkpoint, world_size) if by_rank else found_in(checkpoint)
        return {found[state] for state in disks}

    moments = list(before.during(changes))
    return look(set().union(*moments)), look(moments[-1])


@pytest.mark.parametrize(
    ("old", "new", "world_size"),
    [
        (None, new_plain, 1),
        (old_plain, new_plain, 1),
        (old_plain, new_in_many_files, 1),
        (None, new_rank_by_rank, 1),
        (old_plain, new_rank_by_rank, 1),
        (old_rank_by_rank, new_plain, 1),
        (old_rank_by_rank, new_rank_by_rank, 1),
        (None, new_plain, 2),
        (old_plain, new_plain, 2),
        (old_rank_by_rank, new_rank_by_rank, 2),
        (None, new_rank_by_rank, 2),
        pytest.param(old_plain, new_rank_by_rank, 2, marks=pytest.mark.long),
        pytest.param(old_rank_by_rank, new_plain, 2, marks=pytest.mark.long),
    ],
)
def test_a_power_cut_leaves_the_old_or_the_new_checkpoint_and_after_the_save_the_new_one(
    ranks: RankPool, tmp_path, old, new, world_size
):
    ((during, after),) = ranks(1).run(cut_the_power_everywhere, tmp_path, old, new, world_size, process_group=False)
    assert during == {"nothing" if old is None else 1, 2}
    assert after == {2}


def record_changes(folder: Path, new: Callable[[Path], None]) -> list[Change]:
    return record(folder, None, new, 1)[0]


def test_what_a_power_cut_can_do_to_a_save_that_does_not_sync_is_noticed_here(ranks: RankPool, tmp_path):
    """Of the test above: that it can fail."""
    ((during, after),) = ranks(1).run(
        cut_the_power_everywhere, tmp_path, old_plain, new_without_sync, 1, process_group=False
    )
    assert during == after
    assert 1 in after
    assert 2 not in after
    assert any("DamagedCheckpointError" in str(found) for found in after)


def test_every_file_is_synced_with_all_its_bytes_before_the_index_gets_its_name(ranks: RankPool, tmp_path):
    (changes,) = ranks(1).run(record_changes, tmp_path, new_in_many_files, process_group=False)
    names = [str(change) for change in changes]
    (commit,) = [position for position, change in enumerate(changes) if change.new_path is not None]
    assert Path(changes[commit].new_path).name == ".metadata"
    created = {change.path for change in changes if change.call == "create"}
    synced = {change.path: change.content for change in changes[:commit] if change.content is not None}
    assert created == synced.keys(), names
    assert len(created) == 6, names
    for path, content in synced.items():
        final = changes[commit].new_path if path == changes[commit].path else path
        assert content == Path(final).read_bytes(), path
    # Nothing is written to a file after it was synced.
    for path in created:
        calls = [change.call for change in changes if change.path == path and change.call in ("write", "fsync")]
        assert calls.index("fsync") == len(calls) - 1, calls
