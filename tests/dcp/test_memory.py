"""What saving and loading DCP files takes beside the state: what is on its way, and no second copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast._base.tuning import MEMORY_BUDGET
from tests.dcp.memory import growth_while
from tests.rank_pool import RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LARGE = 160 << 18
"""Elements of 160 MiB: more than may be taken."""
MOST = (MEMORY_BUDGET >> 20) + 64


def state_of(kind: str) -> dict[str, Any]:
    if kind == "one piece":
        return {"w": torch.ones(LARGE)}
    return {"w": torch.ones(LARGE // 1024, 1024).T}


def growth_of_save(path: Path, kind: str) -> int:
    state = state_of(kind)
    return growth_while(lambda: dcp.save(state, checkpoint_id=path, no_dist=True)).anonymous


def growth_of_load(path: Path, kind: str, dtype: torch.dtype) -> int:
    state = {key: torch.full_like(value, 2, dtype=dtype) for key, value in state_of(kind).items()}
    growth = growth_while(lambda: dcp.load(state, checkpoint_id=path, no_dist=True)).anonymous
    assert bool((state["w"] == 1).all())
    return growth


@pytest.mark.parametrize("kind", ["one piece", "transposed"])
def test_a_save_takes_no_copy_of_the_state(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    (growth,) = ranks(1).run(growth_of_save, tmp_path, kind, process_group=False)

    assert growth < MOST


@pytest.mark.parametrize("library", [dcp, stock], ids=["ours", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as stored", "converted"])
def test_a_load_takes_no_copy_of_the_state(ranks: RankPool, tmp_path: Path, library: Any, dtype: torch.dtype) -> None:
    library.save(state_of("one piece"), checkpoint_id=str(tmp_path), no_dist=True)

    (growth,) = ranks(1).run(growth_of_load, tmp_path, "one piece", dtype, process_group=False)

    assert growth < MOST
