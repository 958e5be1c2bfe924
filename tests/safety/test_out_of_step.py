"""A rank that leaves out calls, is late or makes others has no part in those; in the next common one it has again.

All in one process group, and without anything that the program would have to do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
import holdfast.dcp as dcp
from holdfast._ranks import tree_connection
from holdfast._ranks.meeting import meeting
from holdfast.errors import HoldfastError, MissingRanksError, RankDisagreementError
from tests.many_ranks import run_forked

TIMEOUT = 1.5
SIZE = 3
CULPRIT = 1
PATIENCE = 300.0
"""Of the process group: longer than a test may take."""


def state_of(number: int) -> dict[str, Any]:
    return {"weights": torch.full((8,), float(number)), "rank": holdfast.PerRank(dist.get_rank())}


def save(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.save(state_of(number), folder / f"{number}", timeout=timeout)


def save_to_the_same(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.save(state_of(number), folder / "0", overwrite=True, timeout=timeout)


def async_save(folder: Path, number: int, timeout: float) -> Any:
    return holdfast.async_save(state_of(number), folder / f"{number}", timeout=timeout).result()


def dcp_save(folder: Path, number: int, timeout: float) -> Any:
    os.environ["HOLDFAST_TIMEOUT"] = str(timeout)
    return dcp.save({"weights": torch.full((8,), float(number))}, checkpoint_id=folder / f"{number}")


def mixed(folder: Path, number: int, timeout: float) -> Any:
    return (async_save if number % 2 else save)(folder, number, timeout)


Verb = Callable[[Path, int, float], Any]
VERBS: dict[str, Verb] = {each.__name__: each for each in (save, save_to_the_same, async_save, dcp_save, mixed)}


def outcome_of(call: Callable[[], Any]) -> Any:
    """None, or what it raised."""
    try:
        call()
    except HoldfastError as error:
        return error
    return None


def leave_out(verb_name: str, left_out: Sequence[int], culprits: Sequence[int], folder: Path) -> list[Any]:
    """All ranks make calls 0 to 5, except for the culprits, which leave out some of them. They are in step otherwise."""
    verb, outcomes = VERBS[verb_name], []
    for number in range(6):
        is_common = number not in left_out
        if is_common or dist.get_rank() not in culprits:
            outcomes.append(outcome_of(lambda: verb(folder, number, 60.0 if is_common else TIMEOUT)))  # noqa: B023
        else:
            outcomes.append("left out")
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("left_out", [(1,), (0,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_a_rank_that_leaves_out_calls_has_part_in_the_next(verb, left_out, culprit, tmp_path: Path):
    found = run_forked(SIZE, leave_out, verb, left_out, [culprit], tmp_path, group_timeout=PATIENCE)
    for rank, outcomes in enumerate(found):
        for number, outcome in enumerate(outcomes):
            if number not in left_out:
                assert outcome is None, (rank, number, outcome)
            elif rank == culprit:
                assert outcome == "left out"
            else:
                assert isinstance(outcome, MissingRanksError), (rank, number, outcome)
                assert outcome.ranks == [culprit]
