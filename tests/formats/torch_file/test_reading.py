"""Reading files of torch.save: what is accepted, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._formats.torch_file.reading import open_torch_file, read_torch_file
from holdfast.errors import CheckpointNotFoundError, DamagedCheckpointError, RefusedPickleError, UnsupportedValueError


class Custom:
    """A class that torch does not know."""


def read(path: Path, *, allow_pickle: bool = False, verify: bool = True) -> dict[Any, Any]:
    return read_torch_file(path, allow_pickle=allow_pickle, verify=verify)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_dict_comes_back(tmp_path: Path, zipped: bool) -> None:
    state = {"w": torch.arange(3.0), 1: {"step": 7}}
    torch.save(state, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)

    assert repr(read(tmp_path / "f.pt")) == repr(state)


def maps(path: Path) -> list[str]:
    """The places in memory where this process has mapped a file."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]


def anonymous() -> int:
    """Kilobytes of memory that this process uses for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_tensors_take_memory_only_while_they_are_asked_for_and_no_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    saved = torch.arange(6 << 20)
    torch.save({"w": saved, "t": saved.view(6, 1 << 20).T, "step": 7}, path)
    before = anonymous()

    opened = open_torch_file(path, allow_pickle=False, verify=False)
    loaded = opened.state["w"]
    opened.split(opened.state.values(), lambda leaf: isinstance(leaf, torch.Tensor))

    assert anonymous() - before < 8_000
    assert maps(path) == []
    for _ in range(2):
        with opened.present(loaded):
            assert torch.equal(loaded, saved)
            assert anonymous() - before > 32_000
            assert maps(path) == []
        assert anonymous() - before < 16_000
    block = opened.state["t"][5:8, 1:3]
    with opened.present(block):
        assert torch.equal(block, saved.view(6, 1 << 20).T[5:8, 1:3])
    opened.close()


def test_tensors_that_nobody_asks_for_are_there_for_good(tmp_path: Path) -> None:
    shared, other = torch.arange(5000), torch.full((9,), 2.0)
    saved = {"w": torch.ones(3000), "v": shared, "hidden": (shared[7:],), "other": [{"a": other}], "s": other.storage()}
    torch.save(saved, tmp_path / "f.pt")
    opened = open_torch_file(tmp_path / "f.pt", allow_pickle=False, verify=True)
    state = opened.state

    opened.split(state.values(), lambda leaf: isinstance(leaf, torch.Tensor))

    assert not state["w"].any()
    for key in ("v", "w"):
        with opened.present(state[key]):
            assert torch.equal(state[key], saved[key])
    assert torch.equal(state["hidden"][0], shared[7:])
    assert torch.equal(state["other"][0]["a"], other)
    assert list(state["s"]) == [2.0] * 9
    opened.close()


def test_what_only_torch_can_make_is_read_into_memory_without_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    torch.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(4)}, path)

    opened = open_torch_file(path, allow_pickle=False, verify=True)

    with opened.present(opened.state["w"]):
        assert torch.equal(opened.state["w"], torch.ones(4))
    assert torch.equal(opened.state["s"].to_dense(), torch.eye(3))
    assert maps(path) == []


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_is_refused_by_name_and_runs_only_after_an_opt_in(tmp_path: Path, zipped: bool) -> None:
    torch.save({"w": torch.ones(1), "o": Custom()}, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)

    with pytest.raises(RefusedPickleError, match="allow_pickle=True") as raised:
        read(tmp_path / "f.pt")

    assert raised.value.global_name == f"{Custom.__module__}.Custom"
    assert f"{Custom.__module__}.Custom" in str(raised.value)
    assert type(read(tmp_path / "f.pt", allow_pickle=True)["o"]) is Custom


def test_a_class_that_torch_was_told_to_trust_needs_no_opt_in(tmp_path: Path) -> None:
    torch.save({"o": Custom()}, tmp_path / "f.pt")

    with torch.serialization.safe_globals([Custom]):
        assert type(read(tmp_path / "f.pt")["o"]) is Custom


@pytest.mark.parametrize("value", [[torch.ones(1)], torch.ones(1), 7], ids=["list", "tensor", "int"])
def test_what_is_not_a_dict_is_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "f.pt")

    with pytest.raises(
        UnsupportedValueError, match=rf"holds a \w+\.{type(value).__name__}, and a checkpoint is a dict"
    ):
        read(tmp_path / "f.pt")


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        read(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04 and nothing else", b"\x80\x02}q\x00."])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.pt").write_bytes(content)

    with pytest.raises(DamagedCheckpointError, match=r"f\.pt"):
        read(tmp_path / "f.pt")
    with pytest.raises(DamagedCheckpointError, match=r"f\.pt"):
        read(tmp_path / "f.pt", verify=False)


@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04 and nothing else"])
def test_with_code_allowed_a_file_of_another_kind_is_still_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.pt").write_bytes(content)

    with pytest.raises(DamagedCheckpointError, match=r"f\.pt"):
        read(tmp_path / "f.pt", allow_pickle=True)


def test_a_file_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "f.pt")
    whole = (tmp_path / "f.pt").read_bytes()
    for length in (100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "f.pt").write_bytes(whole[:length])

        with pytest.raises(DamagedCheckpointError):
            read(tmp_path / "f.pt")


def test_a_changed_bit_is_noticed_which_torch_does_not(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "f.pt")
    content = bytearray((tmp_path / "f.pt").read_bytes())
    content[content.index(bytes(2000)) + 1000] ^= 4
    (tmp_path / "f.pt").write_bytes(content)

    with pytest.raises(DamagedCheckpointError, match="CRC") as raised:
        read(tmp_path / "f.pt")

    assert raised.value.key == "data/0"
    assert read(tmp_path / "f.pt", verify=False)["w"].count_nonzero() == 1


def test_a_file_without_crcs_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "f.pt")
    finally:
        torch.serialization.set_crc32_options(before)

    assert read(tmp_path / "f.pt")["w"].tolist() == [1, 1, 1]


def test_errors_of_code_that_was_allowed_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"o": Custom()}, tmp_path / "f.pt")
    monkeypatch.delattr(f"{__name__}.Custom")

    with pytest.raises(AttributeError, match="Custom"):
        read(tmp_path / "f.pt", allow_pickle=True)
