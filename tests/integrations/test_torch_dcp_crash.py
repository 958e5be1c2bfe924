"""A save through stock torch that is killed leaves the old checkpoint or the new one, intact."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError
from tests.integrations.torch_dcp_programs import same, save
from tests.rank_pool import RankPool
from tests.safety.syscalls import require_tracing, watch


@pytest.fixture(autouse=True, scope="module")
def _tracing() -> None:
    require_tracing()


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((5, 16), float(number)), "b": torch.full((70,), number), "step": number}


def found_in(path: Path) -> int | str:
    try:
        loaded = holdfast.open(path).read()
    except CheckpointNotFoundError:
        return "nothing"
    return loaded["step"] if same(loaded, state(loaded["step"])) else f"a mix: {loaded}"


def save_state(number: int, path: Path) -> None:
    save(state(number), path, overwrite=True, max_file_size=600)


def kill_everywhere(folder: Path, has_old: bool) -> list[tuple[str, int | str, int]]:
    """What was in the folder after a kill before each change of the disk, and the number of files after a next save."""
    original = folder / "original"
    original.mkdir()
    if has_old:
        save_state(1, original / "c")
    found = []
    for number in itertools.count():
        place = Path(shutil.copytree(original, folder / str(number)))
        watched = watch([partial(save_state, 2, place / "c")], place, kill_at=number)
        after = found_in(place / "c")
        if watched.killed_before is None:
            assert (watched.exit_codes, after) == ({0: 0}, 2)
            return found
        save_state(3, place / "c")
        assert found_in(place / "c") == 3
        found.append((watched.killed_before, after, len(list((place / "c").iterdir()))))
    raise AssertionError


@pytest.mark.parametrize("has_old", [False, True])
def test_a_kill_at_any_change_of_the_disk_leaves_the_old_checkpoint_or_the_new_one(ranks: RankPool, tmp_path, has_old):
    (moments,) = ranks(1).run(kill_everywhere, tmp_path, has_old, process_group=False)

    states = [found for _, found, _ in moments]
    old = 1 if has_old else "nothing"
    committed = next(at for at, found in enumerate(states) if found == 2)
    assert states[:committed] == [old] * committed
    assert states[committed:] == [2] * (len(states) - committed)
    assert committed > 5
    # What kills leave behind is cleared by the next save, which has as many files as one that was not killed.
    assert len({files for _, _, files in moments}) == 1
