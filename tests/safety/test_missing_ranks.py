"""A rank that does not join, hangs, is stopped or dies: all others raise before long and name it, and can go on.

If it lives, they go on with it, in the same process group.

The process group itself would wait for much longer than these tests may take.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
import holdfast._load.load
import holdfast._load.read_division
import holdfast._save.save
import holdfast.dcp as dcp
from holdfast._ranks.meeting import meeting
from holdfast.errors import HoldfastError, MissingRanksError, RankDisagreementError
from tests.many_ranks import meet_again, run_forked

TIMEOUT = 2.0
"""Seconds without progress."""
SIZE = 3
PATIENCE = 300.0
"""Of the process group, in seconds: longer than a test may take."""


def state_of(value: float = 1.0) -> dict[str, Any]:
    return {"weights": torch.full((8,), value), "step": 3}


def save(folder: Path) -> Any:
    return holdfast.save(state_of(), folder / "new", timeout=TIMEOUT)


def async_save(folder: Path) -> Any:
    return holdfast.async_save(state_of(), folder / "new", timeout=TIMEOUT).result()


def async_save_in_process(folder: Path) -> Any:
    return holdfast.async_save(state_of(), folder / "new", timeout=TIMEOUT, writer="process").result()


def load(folder: Path) -> Any:
    return holdfast.load(state_of(0.0), folder / "old", timeout=TIMEOUT)


def restore(folder: Path) -> Any:
    return holdfast.CheckpointManager(
        folder / "run", timeout=TIMEOUT, run_options=holdfast.RunOptions(read_only=True)
    ).restore(state_of(0.0))


def dcp_save(folder: Path) -> Any:
    return dcp.save(state_of(), checkpoint_id=folder / "dcp-new")


def dcp_load(folder: Path) -> Any:
    return dcp.load(state_of(0.0), checkpoint_id=folder / "dcp-old")


VERBS: dict[str, Callable[[Path], Any]] = {
    each.__name__: each for each in (save, async_save, async_save_in_process, load, restore, dcp_save, dcp_load)
}
PLACES: dict[str, tuple[Any, str]] = {
    "write": (holdfast._save.save, "write_chunks"),
    "commit": (holdfast._save.save, "commit_checkpoint"),
    "open": (holdfast._load.load, "open_source"),
    "read": (holdfast._load.read_division, "read_regions"),
    "dcp plan": (dcp.DefaultSavePlanner, "create_local_plan"),
    "dcp write": (dcp.FileSystemWriter, "write_data"),
    "dcp read": (dcp.FileSystemReader, "read_data"),
}


def wait_until_all_others_gave_up(folder: Path, culprit: int) -> None:
    while not all((folder / f"over-{rank}").exists() for rank in range(SIZE) if rank != culprit):
        time.sleep(0.01)


def do_to_this_rank(fault: str, place: str, verb: Callable[[Path], Any], folder: Path) -> Any:
    """Misbehave in a place of a call. Whoever lives on does so when the others have given up."""
    rank = dist.get_rank()
    if fault == "never comes":
        wait_until_all_others_gave_up(folder, rank)
        return None
    if fault == "comes late":
        time.sleep(TIMEOUT / 2)
        return verb(folder)
    if fault == "comes too late":
        wait_until_all_others_gave_up(folder, rank)
        return verb(folder)
    if fault == "calls something else":
        return holdfast.load(state_of(0.0), folder / "old", timeout=TIMEOUT)
    if fault == "calls in the background":  # and waits there for longer than the others do
        return holdfast.async_save(state_of(), folder / "new", timeout=3 * TIMEOUT).result()
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def misbehave(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        if fault == "hangs":
            wait_until_all_others_gave_up(folder, rank)
        else:
            os.kill(os.getpid(), {"is stopped": signal.SIGSTOP, "is killed": signal.SIGKILL}[fault])
        return original(*args, **kwargs)

    setattr(owner, name, misbehave)
    return verb(folder)


def meet_a_fault(verb_name: str, fault: str, place: str, culprit: int, folder: Path, met_before: bool) -> list[Any]:
    """What the call raised, how long that took, and whether the next saves work: with the culprit, if it lives."""
    os.environ["HOLDFAST_TIMEOUT"] = str(TIMEOUT)  # for holdfast.dcp, which takes no argument that torch does not know
    rank, verb = dist.get_rank(), VERBS[verb_name]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if met_before:
        holdfast.save(state_of(), folder / "before", timeout=60)
        # Its process is started once, which takes longer on a busy machine than a rank may be without progress here.
        writer = "process" if verb is async_save_in_process else "thread"
        holdfast.async_save(state_of(), folder / "before", overwrite=True, timeout=60, writer=writer).result()
    dist.barrier()  # ranks that begin at different times would wait for each other as well
    began = time.monotonic()
    error: Any = None
    try:
        do_to_this_rank(fault, place, verb, folder) if rank == culprit else verb(folder)
    except HoldfastError as raised:
        error = raised
    seconds = time.monotonic() - began
    (folder / f"over-{rank}").touch()
    if fault == "is killed":
        rest = [each for each in range(SIZE) if each != culprit]
        meet_again(rest.index(rank), len(rest), "the rest")
    elif fault == "is stopped" and rank == (culprit + 1) % SIZE:
        wait_until_all_others_gave_up(folder, culprit)
        os.kill(int((folder / f"pid-{culprit}").read_text()), signal.SIGCONT)
    holdfast.save(state_of(), folder / "next", timeout=60)
    holdfast.async_save(state_of(), folder / "next in the background", timeout=60).result()
    os.environ["HOLDFAST_TIMEOUT"] = "60"
    dcp.save(state_of(), checkpoint_id=folder / "next of dcp")
    return [error, seconds]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    holdfast.save(state_of(), tmp_path / "old")
    with holdfast.CheckpointManager(tmp_path / "run", background=False) as manager:
        manager.save(3, state_of())
    dcp.save(state_of(), checkpoint_id=tmp_path / "dcp-old", no_dist=True)
    return tmp_path


def check(verb: str, fault: str, place: str, culprit: int, folder: Path, *, met_before: bool = True) -> list[Any]:
    found = run_forked(
        SIZE,
        meet_a_fault,
        verb,
        fault,
        place,
        culprit,
        folder,
        met_before,
        group_timeout=PATIENCE,
        deadline=100,
        may_die=[culprit] if fault == "is killed" else [],
    )
    for name in ("next", "next in the background", "next of dcp"):
        assert holdfast.open(folder / name)["step"] == 3
    others = [outcome for rank, outcome in enumerate(found) if rank != culprit]
    if fault == "comes late":
        assert [error for error, _ in found] == [None] * SIZE
        return found
    if fault not in ("is killed", "never comes"):
        assert isinstance(found[culprit][0], MissingRanksError), found[culprit]
    for error, seconds in others:
        assert seconds < TIMEOUT + 5 or os.getloadavg()[0] > os.cpu_count(), (error, seconds)
        assert isinstance(error, MissingRanksError), error
        assert error.ranks == [culprit]
        assert f"rank {culprit} (" in str(error)
    return others


QUICK = [
    ("save", "never comes", ""),
    ("save", "is stopped", "write"),
    ("save", "is killed", "write"),
    ("save", "comes too late", ""),
    ("async_save", "is stopped", "write"),
    ("async_save", "never comes", ""),
    ("load", "is killed", "read"),
    ("restore", "never comes", ""),
    ("dcp_save", "is killed", "dcp write"),
    ("dcp_load", "never comes", ""),
    ("dcp_save", "comes too late", ""),
]
LONG = [
    *((verb, "never comes", "") for verb in ("async_save_in_process", "load", "dcp_save")),
    *((verb, fault, "") for verb in VERBS for fault in ("comes late", "comes too late")),
    *(("save", fault, place) for fault in ("is stopped", "is killed", "hangs") for place in ("write", "commit")),
    *(("async_save", fault, place) for fault in ("is stopped", "is killed", "hangs") for place in ("write", "commit")),
    *(
        (verb, fault, place)
        for verb in ("load", "restore")
        for fault in ("is stopped", "is killed", "hangs")
        for place in ("open", "read")
    ),
    *(
        ("dcp_save", fault, place)
        for fault in ("is stopped", "is killed", "hangs")
        for place in ("dcp plan", "dcp write")
    ),
    *(("dcp_load", fault, "dcp read") for fault in ("is stopped", "is killed", "hangs")),
]


def named(case: tuple[str, str, str]) -> str:
    return "-".join(part for part in case if part).replace(" ", "_")


@pytest.mark.parametrize("case", QUICK, ids=named)
def test_the_others_name_a_rank_that_is_missing_and_go_on_with_those_that_live(case, folder: Path):
    verb, fault, place = case
    check(verb, fault, place, 2, folder)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in LONG if case not in QUICK], ids=named)
@pytest.mark.parametrize("culprit", [0, 2])
def test_whatever_it_was_doing(case, culprit, folder: Path):
    verb, fault, place = case
    if place == "commit" and culprit != 0:
        pytest.skip("only the coordinator commits")
    check(verb, fault, place, culprit, folder)


def test_a_rank_that_comes_late_is_waited_for(folder: Path):
    check("save", "comes late", "", 2, folder)


def test_before_the_ranks_ever_met(folder: Path):
    for error, _ in check("save", "never comes", "", 2, folder, met_before=False):
        assert "did not join holdfast.save to" in str(error)
        assert "it has not joined this call" in str(error)


def test_where_a_rank_hangs_is_said(folder: Path):
    for error, _ in check("save", "hangs", "write", 1, folder):
        assert "last seen in holdfast.save to" in str(error)
        assert "phase write" in str(error)


def test_ranks_in_different_calls_know_it_at_once(folder: Path):
    found = run_forked(
        SIZE, meet_a_fault, "save", "calls something else", "", 1, folder, True, group_timeout=PATIENCE, deadline=60
    )
    for error, _ in found:
        assert isinstance(error, RankDisagreementError)
        assert "holdfast.load from" in error.views[1]


def test_a_rank_that_saves_in_the_background_while_the_others_wait_is_named(folder: Path):
    others = check("save", "calls in the background", "", 1, folder)
    assert any("it waits for other ranks in background: holdfast.async_save to" in str(error) for error, _ in others)


def find_a_rank_dead() -> Any:
    """It died before the call, which the others notice when they begin to wait for it, or to send to it."""
    rank = dist.get_rank()
    with meeting("together") as ranks:
        ranks.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    try:
        with meeting("the next call", timeout=60) as ranks:
            ranks.barrier()
    except MissingRanksError as error:
        return error.ranks
    return None


def test_a_rank_that_died_before_the_call_is_named_at_once():
    assert run_forked(SIZE, find_a_rank_dead, group_timeout=PATIENCE, deadline=40, may_die=[1]) == [[1], None, [1]]
