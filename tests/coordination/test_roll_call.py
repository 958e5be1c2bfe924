"""Who is missing when a call fails: ranks that never came, and not those that were about to."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed.distributed_c10d import HashStore

from holdfast.coordination import roll_call
from holdfast.coordination.roll_call import RollCall


@pytest.fixture
def rolls() -> list[RollCall]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    made = [RollCall(store, rank, 3) for rank in range(3)]
    for roll in made:
        roll.begin("holdfast.save to x")
        roll.note()
    return made


def test_a_rank_that_did_not_come_is_missing(rolls):
    rolls[0].note()
    rolls[1].note()
    assert list(rolls[0].missing()) == [2]
    assert "last seen in holdfast.save to x" in rolls[0].missing()[2]


def test_a_rank_that_comes_late_is_not_missing(rolls, monkeypatch):
    rolls[0].note()
    monkeypatch.setattr(roll_call.time, "sleep", lambda seconds: rolls[1].note())
    assert list(rolls[0].missing()) == [2]
