from __future__ import annotations

import os

from holdfast._stores.direct_files import reserve
from holdfast._tools.serving.live import written_bytes


def test_space_that_is_only_reserved_does_not_count_as_written(tmp_path) -> None:
    file = tmp_path / "data"
    with file.open("wb") as stream:
        reserve(stream.fileno(), 1 << 24)
        assert file.stat().st_size == 1 << 24
        assert written_bytes(file) == 0
        os.pwrite(stream.fileno(), b"x" * (1 << 20), 0)
        os.pwrite(stream.fileno(), b"x" * (1 << 20), 1 << 23)

        assert written_bytes(file) == 2 << 20


def test_a_file_without_holes_is_written_to_its_last_byte(tmp_path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 12345)

    assert written_bytes(file) == 12345


def test_an_empty_file_has_nothing_written(tmp_path) -> None:
    (tmp_path / "data").touch()

    assert written_bytes(tmp_path / "data") == 0
