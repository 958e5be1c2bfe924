"""What a failed call leaves in memory: nothing, once its error is dropped, without help of the garbage collector."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
import holdfast.dcp as dcp
from holdfast._ranks.meeting import meeting
from holdfast._ranks.shared_steps import Collectives
from holdfast.errors import CheckpointException, CheckpointNotFoundError
from tests.rank_pool import RankPool


class Large:
    """Something that is worth to be let go."""


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_let_go(use: Callable[[Large], Any]) -> str:
    """Whether something that a failing call has used is gone when its error is: the error's class, or why not."""
    kept: list[weakref.ref[Any]] = []

    def call() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        use(large)

    try:
        call()
    except BaseException as error:
        name = type(error).__name__
        del error
    else:
        return "no error"
    return name if kept[0]() is None else f"{name} keeps it alive"


def failing_with(error: Callable[[], BaseException], large: Large) -> Callable[[], None]:
    def fail() -> None:
        held = large
        raise error() from KeyError(id(held))

    return fail


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("of the program"),
    "CheckpointNotFoundError": lambda: CheckpointNotFoundError("not there", path="x"),
    "KeyboardInterrupt": KeyboardInterrupt,
}


STEPS: dict[str, Callable[[Collectives, Callable[[], Any]], Any]] = {
    "all_gather": lambda ranks, fail: ranks.all_gather("step", fail),
    "all_reduce": lambda ranks, fail: ranks.all_reduce("step", fail, sum),
    "reduce": lambda ranks, fail: ranks.all_reduce("step", lambda: 1, lambda values: fail()),
    "reduce_scatter": lambda ranks, fail: ranks.reduce_scatter("step", fail, lambda values: values),
    "broadcast": lambda ranks, fail: ranks.broadcast("step", fail),
    "own_error_first": lambda ranks, fail: ranks.own_error_first("step", fail),
}


def fail_in_meetings(failing: list[int]) -> dict[str, str]:
    """On some ranks. The others use something large as well."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {}
    with no_collector():
        for (step, take), (name, error) in itertools.product(STEPS.items(), ERRORS.items()):

            def use(large: Large, take: Any = take, error: Any = error) -> None:
                fail = failing_with(error, large)
                with meeting("call") as ranks:
                    take(ranks, fail if rank in failing else lambda: 1 if large else 0)

            found[f"{step} {name}"] = is_let_go(use)
    return found


def assert_all_let_go(found: dict[str, str], names: dict[str, str]) -> None:
    for case, told in found.items():
        assert told == names.get(case.split()[1], case.split()[1]), case


def test_alone_nothing_is_kept() -> None:
    assert_all_let_go(fail_in_meetings([0]), {})


def test_a_cause_keeps_its_own_cause() -> None:
    with pytest.raises(ValueError, match="of the program") as caught, meeting("call") as ranks:
        ranks.all_gather("step", failing_with(ERRORS["ValueError"], Large()))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_neither_on_the_rank_that_fails_nor_on_the_others(ranks: RankPool, failing: list[int]) -> None:
    found = ranks(2).run(fail_in_meetings, failing)
    for rank, cases in enumerate(found):
        on_coordinator = {case: told for case, told in cases.items() if case.startswith(("broadcast", "reduce "))}
        rest = {case: told for case, told in cases.items() if case not in on_coordinator}
        assert_all_let_go(rest, {} if rank in failing else {"KeyboardInterrupt": "RankLeftError"})
        if 0 in failing:
            assert_all_let_go(on_coordinator, {} if rank == 0 else {"KeyboardInterrupt": "RankLeftError"})
        else:
            assert set(on_coordinator.values()) == {"no error"}


def fail_in_verbs(folder: Path) -> dict[str, str]:
    rank = dist.get_rank() if dist.is_initialized() else 0

    def with_tensor(call: Callable[[dict[str, Any]], Any]) -> Callable[[Large], Any]:
        def use(large: Large) -> None:
            tensor: Any = torch.ones(10)
            tensor.large = large
            state = {"w": tensor, "odd": object() if rank == 0 else 1}
            call(state)

        return use

    with no_collector():
        return {
            "save": is_let_go(with_tensor(lambda state: holdfast.save(state, folder))),
            "load": is_let_go(with_tensor(lambda state: holdfast.load(state, folder / "missing"))),
            "dcp.load": is_let_go(with_tensor(lambda state: dcp.load(state, checkpoint_id=folder / "missing"))),
        }


def test_a_save_or_load_that_failed_keeps_no_state(ranks: RankPool, tmp_path: Path) -> None:
    for count in (1, 2):
        for found in ranks(count).run(fail_in_verbs, tmp_path / "x"):
            assert found["save"] == "UnsupportedValueError"
            assert found["load"] == "CheckpointNotFoundError"
            assert found["dcp.load"] == CheckpointException.__name__
    assert fail_in_verbs(tmp_path / "x")["save"] == "UnsupportedValueError"
