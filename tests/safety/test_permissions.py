"""Files get the permissions that the umask leaves, and what can be read can be loaded."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.safety.checkpoints import found_in, save

NOBODY = 65534


def save_with_umask(umask: int, folder: Path, use_collectives: bool) -> None:
    before = os.umask(umask)
    try:
        save(1, folder, use_collectives=use_collectives)
        save(2, folder, use_collectives=use_collectives, thread_count=2)
    finally:
        os.umask(before)


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_files_and_folders_are_made_with_the_umask_of_the_user(ranks: RankPool, tmp_path, umask, use_collectives):
    folder = tmp_path / "run" / "checkpoints" / "step"
    ranks(2).run(save_with_umask, umask, folder, use_collectives)
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in folder.iterdir()}
    assert len(modes) >= 3
    assert {name.rpartition(".")[2] for name in modes} == {"distcp", "metadata"}
    assert set(modes.values()) == {oct(0o666 & ~umask)}, modes
    for made in (folder, folder.parent, folder.parent.parent):
        assert oct(made.stat().st_mode & 0o777) == oct(0o777 & ~umask)


def load_as_nobody(root: Path, folder: str) -> tuple[Any, Any]:
    """What somebody finds who may read the folder and write nowhere, by a text and by a path."""
    found_in(root / folder)  # whatever is imported late must be imported before the rest of the disk is out of reach

    def load() -> tuple[Any, Any]:
        return found_in(f"/{folder}"), found_in(Path("/", folder))

    return as_nobody(root, load)


def as_nobody(root: Path, function: Callable[[], Any]) -> Any:
    """Run in a child process that sees only what is below `root`, and has no rights to speak of."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chroot(root)
            os.chdir("/")
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, repr(function()).encode())
        except BaseException as error:
            os.write(writing, repr(repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return ast.literal_eval(text)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@as_root
@pytest.mark.parametrize("use_collectives", [True, False])
def test_whoever_may_only_read_can_load(ranks: RankPool, tmp_path, use_collectives):
    """Neither the checkpoint nor any folder above it can be written to."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "store" / "checkpoint"
    ranks(2).run(save_with_umask, 0o022, folder, use_collectives)
    make_read_only(folder)
    (found,) = ranks(1).run(load_as_nobody, tmp_path, "store/checkpoint", process_group=False)
    assert found == (2, 2)


def make_read_only(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)


def test_loading_changes_nothing_in_the_folder(tmp_path):
    save(1, tmp_path)
    make_read_only(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    assert found_in(tmp_path) == 1
    assert {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before
    tmp_path.chmod(0o755)


@as_root
def test_an_index_that_may_not_be_read_is_not_replaced_by_older_ones(ranks: RankPool, tmp_path):
    """A save that was killed after its commit leaves the rank indexes of the old checkpoint behind."""
    tmp_path.chmod(0o755)
    folder = tmp_path / "checkpoint"
    save(1, folder, use_collectives=False)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    save(2, folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    (folder / ".metadata").chmod(0o600)
    ((by_text, by_path),) = ranks(1).run(load_as_nobody, tmp_path, "checkpoint", process_group=False)
    assert by_text == by_path
    assert by_text.startswith("PermissionError")
