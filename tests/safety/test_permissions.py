"""Files get the permissions that the umask leaves, and what can be read can be loaded."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
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


def load_as_nobody(folder: Path) -> tuple[Any, Any]:
    """What somebody who may only read finds, by a text and by a path."""
    return as_nobody(lambda: (found_in(str(folder)), found_in(folder)))


def as_nobody(function: Callable[[], Any]) -> Any:
    """Run in a child process that has no rights to speak of."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("use_collectives", [True, False])
def test_whoever_may_only_read_can_load(ranks: RankPool, tmp_path_factory, use_collectives):
    folder = tmp_path_factory.mktemp("store") / "checkpoint"
    ranks(2).run(save_with_umask, 0o022, folder, use_collectives)
    make_read_only(folder)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(0o755)  # the temporary folders of pytest are private
    ((by_text, by_path),) = ranks(1).run(load_as_nobody, folder, process_group=False)
    assert (by_text, by_path) == (2, 2)


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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_an_index_that_may_not_be_read_is_not_replaced_by_older_ones(ranks: RankPool, tmp_path_factory):
    """A save that was killed after its commit leaves the rank indexes of the old checkpoint behind."""
    folder = tmp_path_factory.mktemp("store")
    save(1, folder, use_collectives=False)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    save(2, folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    (folder / ".metadata").chmod(0o600)
    for parent in [folder, *folder.parents]:
        if parent.stat().st_mode & 0o005 != 0o005:
            parent.chmod(0o755)
    ((by_text, by_path),) = ranks(1).run(load_as_nobody, folder, process_group=False)
    assert by_text == by_path
    assert by_text.startswith("PermissionError")
