"""Interrupts and kills at every call to the system while a conversion replaces an older result, and odd names."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

import holdfast
from holdfast._tools.converting import placing
from holdfast._tools.converting.work_folders import left_over, sweep
from tests.tools.repairing.checkpoints import ended_by, in_a_process_that_is_killed

BOTH = (["v"], ["w", "v"])
"""The keys of the old result, and those of the new one."""

ODD_NAMES = [
    "old",
    "new",
    "scratch",
    "gone",
    "conversion",
    "a.b.c",
    "..x",
    ".x.partial",
    ".x.holdfast-0123456789abcdef.partial",
    "x.holdfast-0123456789abcdef.partial",
    "line\nbreak",
    "weiß 日本",
    "long" * 55,
    "日" * 75,
]


class Strike:
    """Does something at the n-th event around a call to the system, from the moment at which placing begins."""

    def __init__(self, at: int, action) -> None:
        self.left = at
        self._action = action
        self._began = False

    def __call__(self, frame, event, arg) -> None:
        if event == "call" and frame.f_code is placing.put_in_place.__code__:
            self._began = True
        if not self._began or event not in ("c_call", "c_return") or getattr(arg, "__module__", "") != "posix":
            return
        self.left -= 1
        if self.left == -1:
            self._action()


@contextmanager
def profiled(strike):
    sys.setprofile(strike)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def names_that_cannot_be_exchanged():
    with mock.patch.object(placing, "_renameat2", return_value=None):
        yield


def interrupt():
    raise KeyboardInterrupt


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.arange(50), "v": torch.ones(3)}, tmp_path / "templates/source")
    holdfast.convert(tmp_path / "templates/source", tmp_path / "templates/model", to="native", include="v")
    (tmp_path / "templates/model/config.json").write_text("{}")
    return tmp_path / "templates"


def assert_old_or_new(place: Path) -> None:
    """One of them is there, or is put there by the next who looks; then all goes on as if nothing had happened."""
    final = place / "model"
    if not final.exists():
        sweep(final)
    assert list(holdfast.open(final)) in BOTH
    assert holdfast.verify(final).ok
    assert (final / "config.json").read_text() == "{}"
    holdfast.convert(place / "source", final, to="native", overwrite=True)
    assert list(holdfast.open(final)) == BOTH[1]
    assert (final / "config.json").read_text() == "{}"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["sampled", "everywhere"])
def test_an_interrupt_at_any_call_to_the_system_leaves_the_old_result_or_the_new_one(templates, tmp_path, every):
    for number in range(0, 1000, every):
        place = tmp_path / f"interrupted-{number}"
        shutil.copytree(templates, place)
        strike = Strike(number, interrupt)
        # shutil closes a descriptor twice if it is interrupted right after it has closed it
        with suppress(KeyboardInterrupt, OSError), names_that_cannot_be_exchanged(), profiled(strike):
            holdfast.convert(place / "source", place / "model", to="native", overwrite=True)
        if strike.left >= 0:
            break
        assert_old_or_new(place)
    assert number > 20
    assert left_over(place) == []


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["sampled", "everywhere"])
def test_a_kill_at_any_call_to_the_system_leaves_the_old_result_or_the_new_one(templates, tmp_path, every):
    for number in range(0, 1000, every):
        place = tmp_path / f"killed-{number}"
        shutil.copytree(templates, place)

        def convert(place=place, number=number):
            with names_that_cannot_be_exchanged(), profiled(Strike(number, die)):
                holdfast.convert(place / "source", place / "model", to="native", overwrite=True)

        was_killed = ended_by(convert) == signal.SIGKILL
        assert_old_or_new(place)
        assert sorted(path.name for path in place.iterdir()) == ["model", "source"]
        if not was_killed:
            break
    assert number > 20


def test_a_checkpoint_that_replaces_itself_can_be_converted_again_after_a_kill(templates):
    """The source of the second attempt is what the first one took away."""
    final = templates / "model"

    def convert():
        with (
            names_that_cannot_be_exchanged(),
            mock.patch.object(placing.os, "rename", side_effect=_rename_and_die(os.rename)),
        ):
            holdfast.convert(final, final, to="dcp", overwrite=True)

    in_a_process_that_is_killed(convert)
    assert not final.exists()
    holdfast.convert(final, final, to="dcp", overwrite=True)
    assert holdfast.open(final).format == "dcp"
    assert left_over(templates) == []


def _rename_and_die(rename):
    def renaming(old, new):
        rename(old, new)
        die()

    return renaming


def test_what_was_replaced_does_not_come_back_after_its_successor_was_removed(templates):
    """A kill while the old one is being removed must not bring back what is left of it when the new one goes."""
    final = templates / "model"

    def convert():
        with (
            names_that_cannot_be_exchanged(),
            mock.patch("shutil.rmtree", side_effect=lambda *_, **__: die()),
        ):
            holdfast.convert(templates / "source", final, to="native", overwrite=True)

    in_a_process_that_is_killed(convert)
    assert list(holdfast.open(final)) == BOTH[1]
    shutil.rmtree(final)
    sweep(final)
    assert not final.exists()
    assert left_over(templates) == []


def test_copies_of_files_beside_a_checkpoint_are_durable_before_the_originals_go(templates, monkeypatch):
    final = templates / "model"
    synced, fsync = set(), os.fsync

    def noting(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError(1, "no links here")))
    holdfast.convert(templates / "source", final, to="native", overwrite=True)
    assert (final / "config.json").stat().st_ino in synced


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("to", ["native", "dcp", "safetensors", "torch"])
def test_what_a_killed_conversion_left_never_gets_the_name_whatever_that_is(templates, tmp_path, to, name):
    final = tmp_path / "x" / name

    def convert():
        with mock.patch("holdfast._tools.converting.convert.prove", side_effect=lambda *_: die()):
            holdfast.convert(templates / "source", final, to=to)

    in_a_process_that_is_killed(convert)
    assert not final.exists()
    assert len(left_over(tmp_path / "x")) == 1
    assert len(sweep(final)) == 1
    assert list((tmp_path / "x").iterdir()) == []
    holdfast.convert(templates / "source", final, to=to)
    assert list(holdfast.open(final)) == BOTH[1]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_results_of_any_name_are_no_left_over_of_another(templates, tmp_path, name):
    """Not even if a folder that somebody keeps checkpoints in has the name of a work folder."""
    place = tmp_path / ".x.holdfast-fedcba9876543210.partial"
    holdfast.convert(templates / "source", place / name, to="native")
    holdfast.convert(templates / "source", tmp_path / name, to="native")
    holdfast.convert(templates / "source", tmp_path / "x", to="native")
    sweep(tmp_path / "x")
    holdfast.repair(tmp_path, apply=True, sweep=True)
    for kept in (place / name, tmp_path / name, tmp_path / "x"):
        assert list(holdfast.open(kept)) == BOTH[1]
