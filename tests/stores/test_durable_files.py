"""Files that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast._stores import durable_files
from holdfast._stores.durable_files import written_atomically
from holdfast._stores.local_filesystem import FileSystem


def write_half(path: Path, error: type[BaseException]) -> None:
    with written_atomically(path) as stream:
        stream.write(b"half")
        raise error


@pytest.fixture(params=["nameless", "named"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as on file systems that know no files without a name."""
    if request.param == "named":
        monkeypatch.delattr(durable_files.os, "O_TMPFILE")


@pytest.mark.usefixtures("both_ways")
class TestBothWays:
    def test_content_appears_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        path.write_bytes(b"old")

        with written_atomically(path) as stream:
            stream.write(b"new")
            stream.flush()
            assert path.read_bytes() == b"old"

        assert path.read_bytes() == b"new"
        assert os.listdir(tmp_path) == ["f"]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
    def test_after_an_error_everything_is_as_before(self, tmp_path: Path, error: type[BaseException]) -> None:
        (tmp_path / "old").write_bytes(b"old")

        for name in ("old", "new"):
            with pytest.raises(error):
                write_half(tmp_path / name, error)

        assert os.listdir(tmp_path) == ["old"]
        assert (tmp_path / "old").read_bytes() == b"old"

    def test_the_file_has_the_permissions_that_the_umask_leaves(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            with written_atomically(tmp_path / "f"):
                pass
        finally:
            os.umask(before)

        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("target")

        with written_atomically(tmp_path / "link") as stream:
            stream.write(b"new")

        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == b"new"


def test_a_folder_in_the_place_of_the_file_or_none_around_it_is_reported(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), written_atomically(tmp_path):
        raise AssertionError("it began")
    with pytest.raises(FileNotFoundError, match="no such folder"), written_atomically(tmp_path / "no" / "f"):
        raise AssertionError("it began")
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from holdfast._stores.durable_files import written_atomically
with written_atomically(sys.argv[1]) as stream:
    stream.write(b"half")
    stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are a thing of Linux")
def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "f")], check=False)

    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))])
def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path, make: Any) -> None:
    try:
        make(tmp_path / "special")
    except PermissionError:
        pytest.skip("only root can make devices")
    before = (tmp_path / "special").stat().st_mode
    with pytest.raises(FileExistsError, match="device or a pipe"), written_atomically(tmp_path / "special"):
        pass
    assert (tmp_path / "special").stat().st_mode == before
    assert [path.name for path in tmp_path.iterdir()] == ["special"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(mode)
    with written_atomically(file) as stream:
        stream.write(b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_nothing_is_left_of_a_small_file_that_could_not_be_flushed(tmp_path: Path, monkeypatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    durable_files.write_durably(FileSystem(), tmp_path / "first", b"content")
    assert (tmp_path / "first").read_bytes() == b"content"
    monkeypatch.setattr(os, "fsync", fail)
    durable_files.write_durably(FileSystem(), tmp_path / "second", b"content", sync=False)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        durable_files.write_durably(FileSystem(), tmp_path / "third", b"content")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_temporary_names_belong_to_one_file() -> None:
    names = [durable_files.temporary_name(name) for name in ("record", "record", "record.old", "other")]
    assert len(set(names)) == 4
    assert durable_files.temporaries_of("record", [*names, "record", ".record.tmp"]) == names[:2]
