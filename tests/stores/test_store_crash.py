"""A kill, or a power cut, at any moment of a commit leaves the old content or the new one, intact."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast._stores.local_store import LocalStore
from tests.rank_pool import RankPool
from tests.safety.power_loss import PowerCuts, write_disk
from tests.safety.syscalls import require_tracing, watch

OLD = b"old " * 1000
NEW = b"new " * 1500
DATA = b"data" * 2000
STEP = Path("runs", "step")


@pytest.fixture(autouse=True, scope="module")
def _tracing() -> None:
    require_tracing()


def content_of(folder: Path, name: str) -> bytes | None:
    path = folder / STEP / name
    return path.read_bytes() if path.exists() else None


def names_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / STEP).glob("*")}


def commit(replaces: bytes | None, folder: Path) -> None:
    LocalStore(folder / STEP).commit("record", NEW, replaces=replaces)


def save(replaces: bytes | None, folder: Path) -> None:
    """What a save does: data, then the names, then the commit."""
    store = LocalStore(folder / STEP)
    with store.create("data") as sink:
        sink.write(DATA[:5000])
        sink.write(DATA[5000:])
    store.sync()
    store.commit("record", NEW, replaces=replaces)


def prepare(folder: Path, old: bytes | None) -> Path:
    folder.mkdir()
    if old is not None:
        LocalStore(folder / STEP).commit("record", old, replaces=None)
    return folder


def kill_everywhere(folder: Path, old: bytes | None, action: Callable[[Path], None]) -> list[tuple[str, bytes | None]]:
    """Before which change the process died, and what was at the name then. The next commit must work each time."""
    moments = []
    for number in range(100):
        place = prepare(folder / str(number), old)
        watched = watch([partial(action, place)], place, kill_at=number)
        found = content_of(place, "record")
        if watched.killed_before is None:
            assert watched.exit_codes == {0: 0}
            assert found == NEW
            assert names_in(place) <= {"record", "data"}
            return moments
        if found == NEW and action.func is save:
            assert content_of(place, "data") == DATA, f"killed before {watched.killed_before}"
        LocalStore(place / STEP).commit("record", b"next", replaces=found)
        assert names_in(place) <= {"record", "data"}, f"killed before {watched.killed_before}"
        assert content_of(place, "record") == b"next"
        moments.append((watched.killed_before, found))
        shutil.rmtree(place)
    raise AssertionError


@pytest.mark.parametrize("action", [commit, save])
@pytest.mark.parametrize("old", [None, OLD], ids=["first", "overwrite"])
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new_content(ranks: RankPool, tmp_path, old, action):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, old, partial(action, old), process_group=False)
    story = "\n".join(f"before {before}: {found and found[:4]!r}" for before, found in moments)
    assert {found for _, found in moments} == {old, NEW}, story
    assert len(moments) >= 5, story


def cut_the_power_everywhere(
    folder: Path, old: bytes | None, action: Callable[[Path], None]
) -> tuple[set[tuple[bytes | None, bool]], set[tuple[bytes | None, bool]]]:
    """What could be at the name, and whether the data was complete: during the action, and just after it."""
    place = prepare(folder / "disk", old)
    before = PowerCuts(place)
    watched = watch([partial(action, place)], place)
    assert watched.exit_codes == {0: 0}
    seen = {}

    def look(disks: set) -> set[tuple[bytes | None, bool]]:
        for disk in disks - seen.keys():
            write_disk(disk, folder / f"cut-{len(seen)}")
            found = folder / f"cut-{len(seen)}"
            seen[disk] = (content_of(found, "record"), content_of(found, "data") == DATA)
        return {seen[disk] for disk in disks}

    moments = list(before.during(watched.changes))
    return look(set().union(*moments)), look(moments[-1])


@pytest.mark.parametrize("old", [None, OLD], ids=["first", "overwrite"])
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new_content_and_the_data_of_the_new(
    ranks: RankPool, tmp_path, old
):
    ((during, after),) = ranks(1).run(cut_the_power_everywhere, tmp_path, old, partial(save, old), process_group=False)
    assert during == {(old, False), (old, True), (NEW, True)}
    assert after == {(NEW, True)}


def save_into_a_folder_of_someone_killed(folder: Path) -> None:
    (folder / STEP).mkdir(parents=True, exist_ok=True)
    save(None, folder)


def test_a_folder_that_was_made_by_a_process_that_died_is_made_durable(ranks: RankPool, tmp_path):
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (after,) = ranks(1).run(cut_after_mkdir, tmp_path, process_group=False)
    assert after == {(NEW, True)}


def cut_after_mkdir(folder: Path) -> set[tuple[bytes | None, bool]]:
    """As above, but the folder is there, and nobody has synced its parent."""
    place = folder / "disk"
    before = PowerCuts(place)
    watched = watch([partial(save_into_a_folder_of_someone_killed, place)], place)
    assert watched.exit_codes == {0: 0}
    found = set()
    for number, disk in enumerate(list(before.during(watched.changes))[-1]):
        write_disk(disk, folder / f"cut-{number}")
        cut = folder / f"cut-{number}"
        found.add((content_of(cut, "record"), content_of(cut, "data") == DATA))
    return found
