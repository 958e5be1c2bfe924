"""Steps that run on every rank: their results, and how an error of one rank becomes an error of all."""

from __future__ import annotations

import pickle
import sys
import types
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper as StockCollectives

from holdfast._ranks.failures import wrap_exception
from holdfast._ranks.shared_steps import Collectives, failures_of
from holdfast.errors import CheckpointException
from tests.rank_pool import RankPool


@dataclass(frozen=True)
class Case:
    """Who takes part: a world, maybe only some of it, and the coordinator as counted inside of the group."""

    world_size: int
    members: tuple[int, ...] | None
    coordinator: int

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.world_size))

    @property
    def group_size(self) -> int:
        return len(self.global_ranks)

    def __str__(self) -> str:
        group = "all" if self.members is None else "group" + "".join(map(str, self.members))
        return f"{self.world_size}ranks-{group}-coordinator{self.coordinator}"

    def run(self, pool: RankPool, body: Any, *args: Any) -> list[Any]:
        """The results of the members. A step that leaves a rank waiting fails at the group's timeout."""
        results = pool(self.world_size).run(body, self, *args, group_timeout=20, deadline=60)
        return [results[rank] for rank in self.global_ranks]

    def join(self, kind: type[Any] = Collectives) -> Any:
        """On a rank: its end of the group; None on a rank that is not a member."""
        group = None if self.members is None else dist.new_group(list(self.members))
        if dist.get_rank() not in self.global_ranks:
            return None
        return kind(group, True, self.coordinator)


CASES = [
    Case(1, None, 0),
    Case(2, None, 0),
    Case(2, None, 1),
    Case(3, None, 1),
    Case(4, None, 3),
    Case(4, (0, 2), 1),
    Case(4, (1, 3), 1),
    Case(4, (1, 2, 3), 0),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
some_cases = pytest.mark.parametrize("case", [Case(1, None, 0), Case(3, None, 1), Case(4, (1, 2, 3), 2)], ids=str)


def alone() -> Collectives:
    return Collectives(None, use_dist=False, coordinator_rank=0)


# --- results -----------------------------------------------------------------------------------------------------


def results_of_all_steps(case):
    ranks = case.join()
    if ranks is None:
        return None
    me = ranks.rank
    return {
        "reduce_scatter": ranks.reduce_scatter(
            "step", lambda: me * 10, lambda values: [(values, place, dist.get_rank()) for place in range(len(values))]
        ),
        "all_reduce": ranks.all_reduce("step", lambda: me + 1, lambda values: (sum(values), dist.get_rank())),
        "all_gather": ranks.all_gather("step", dist.get_rank),
        "own": ranks.own_error_first("step", lambda: lambda: me)(),
        "broadcast": ranks.broadcast("step", dist.get_rank),
    }


@every_case
def test_each_step_gives_each_rank_its_result(ranks: RankPool, case: Case):
    size, coordinator = case.group_size, case.global_ranks[case.coordinator]
    for place, result in enumerate(case.run(ranks, results_of_all_steps)):
        assert result == {
            "reduce_scatter": ([rank * 10 for rank in range(size)], place, coordinator),
            "all_reduce": (size * (size + 1) // 2, coordinator),
            "all_gather": list(case.global_ranks),
            "own": place,
            "broadcast": coordinator,
        }


def test_without_a_group_each_step_runs_here():
    ranks = alone()
    assert ranks.reduce_scatter("step", lambda: 7, lambda values: [values]) == [7]
    assert ranks.all_reduce("step", lambda: 7, sum) == 7
    assert ranks.all_gather("step", lambda: 7) == [7]
    assert ranks.own_error_first("step", lambda: 7) == 7
    assert ranks.broadcast("step", lambda: 7) == 7


def roles(case, kind):
    ranks = case.join(kind)
    if ranks is None:
        return None
    return {
        "rank": ranks.get_rank(),
        "world_size": ranks.get_world_size(),
        "is_coordinator": ranks.is_coordinator,
        "coordinator_rank": ranks.coordinator_rank,
        "global_coordinator_rank": ranks.global_coordinator_rank,
        "broadcast": ranks.broadcast_object(f"object of {ranks.rank}"),
        "gather": ranks.gather_object(ranks.rank),
        "all_gather": ranks.all_gather_object({"from": ranks.rank}),
        "scatter": ranks.scatter_object(
            [n * n for n in range(ranks.get_world_size())] if ranks.is_coordinator else None
        ),
        "barrier": ranks.barrier(),
    }


def roles_in_both(case):
    return roles(case, Collectives), roles(case, StockCollectives)


@every_case
def test_roles_and_plain_exchanges_are_those_of_the_stock_wrapper(ranks: RankPool, case: Case):
    for ours, stock in case.run(ranks, roles_in_both):
        assert ours == stock


def test_without_a_group_roles_and_plain_exchanges_are_those_of_the_stock_wrapper():
    ours, stock = alone(), StockCollectives(None, False, 0)
    assert (ours.get_rank(), ours.get_world_size(), ours.is_coordinator) == (
        stock.get_rank(),
        stock.get_world_size(),
        stock.is_coordinator,
    )
    for name, argument in [("broadcast", 5), ("gather", 5), ("all_gather", 5), ("scatter", [5])]:
        assert getattr(ours, f"{name}_object")(argument) == getattr(stock, f"{name}_object")(argument)
    assert ours.barrier() is stock.barrier() is None
    with pytest.raises(AssertionError):
        ours.scatter_object(None)


def peers(case):
    ranks = case.join()
    return ranks and ranks.global_ranks()


@some_cases
def test_the_members_are_named_by_their_numbers_in_the_job(ranks: RankPool, case: Case):
    assert case.run(ranks, peers) == [case.global_ranks] * case.group_size
    assert alone().global_ranks() == (0,)


def joining_as_a_stranger():
    group = dist.new_group([0])
    try:
        Collectives(group, True, 0)
    except RuntimeError as error:
        return str(error)
    return None


def test_a_rank_outside_of_the_group_is_refused(ranks: RankPool):
    inside, outside = ranks(2).run(joining_as_a_stranger)
    assert inside is None
    assert "not part of the process group" in outside


def coordinators_that_are_refused():
    group = dist.new_group([0, 1])
    refused = []
    for candidate in (-1, 0, 1, 2):
        try:
            Collectives(group, True, candidate)
        except ValueError as error:
            refused.append((candidate, "counted inside the group" in str(error)))
    return refused


def test_a_coordinator_outside_of_the_group_is_refused(ranks: RankPool):
    assert ranks(2).run(coordinators_that_are_refused) == [[(-1, True), (2, True)]] * 2


# --- errors ------------------------------------------------------------------------------------------------------


def caught(function) -> dict[str, Any]:
    """What a call raised, as plain data."""
    try:
        return {"returned": function()}
    except CheckpointException as error:
        return {
            "type": "CheckpointException",
            "step": error.args[0],
            "failures": {
                rank: (type(cause).__name__, _text(cause), [frame.name for frame in stack])
                for rank, (cause, stack) in error.failures.items()
            },
            "stacks": all(isinstance(stack, StackSummary) for _, stack in error.failures.values()),
            "cause": type(error.__cause__).__name__,
            "text": str(error),
        }
    except BaseException as error:
        return {"type": type(error).__name__, "args": error.args}


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(no text)"


def run_step(ranks: Collectives, kind: str, map_fun, reduce_fun) -> Any:
    if kind == "reduce_scatter":
        return ranks.reduce_scatter("this step", map_fun, reduce_fun)
    if kind == "all_reduce":
        return ranks.all_reduce("this step", map_fun, reduce_fun)
    if kind == "step":
        with ranks.step("this step"):
            return map_fun()
    return getattr(ranks, kind)("this step", map_fun)


REDUCING = ("reduce_scatter", "all_reduce")
ON_ALL_RANKS = (*REDUCING, "all_gather", "step")


def fail(ranks: Collectives, kind: str, side: str, failing: int, make_error) -> tuple[dict[str, Any], list[int]]:
    """Run a step that fails in one place, then another one that must work."""

    def map_fun():
        if side == "map" and ranks.rank == failing:
            raise make_error()
        return ranks.rank

    def reduce_fun(values):
        raise make_error()

    outcome = caught(lambda: run_step(ranks, kind, map_fun, reduce_fun if side == "reduce" else list))
    return outcome, ranks.all_gather("the next step", lambda: ranks.rank)


def places(ranks: Collectives) -> list[tuple[str, str, int]]:
    """Everywhere that a step can fail: its kind, the side of it, and the rank."""
    everywhere = [(kind, "map", rank) for kind in ON_ALL_RANKS for rank in range(ranks.world_size)]
    on_coordinator = [(kind, "reduce") for kind in REDUCING] + [("broadcast", "map")]
    return everywhere + [(kind, side, ranks.coordinator_rank) for kind, side in on_coordinator]


def boom():
    return ValueError("boom")


def fail_everywhere(case, make_error):
    ranks = case.join()
    if ranks is None:
        return None
    return {place: fail(ranks, *place, make_error) for place in places(ranks)}


@every_case
def test_an_error_on_any_rank_reaches_every_rank_and_the_group_stays_usable(ranks: RankPool, case: Case):
    per_rank = case.run(ranks, fail_everywhere, boom)
    assert len(per_rank[0]) == len(ON_ALL_RANKS) * case.group_size + 3
    for outcomes in per_rank:
        for (_, side, failing), (outcome, next_step) in outcomes.items():
            assert outcome["type"] == "CheckpointException"
            assert outcome["step"] == "this step"
            assert list(outcome["failures"]) == [failing]
            name, text, frames = outcome["failures"][failing]
            assert (name, text) == ("ValueError", "boom")
            assert f"{side}_fun" in frames
            assert outcome["stacks"]
            assert outcome["cause"] == "ValueError"
            assert next_step == list(range(case.group_size))


@some_cases
def test_the_text_of_the_error_shows_the_rank_and_its_traceback(ranks: RankPool, case: Case):
    for outcomes in case.run(ranks, fail_everywhere, boom):
        for (_, side, failing), (outcome, _) in outcomes.items():
            assert f"(RANK {failing})" in outcome["text"]
            assert f"in {side}_fun" in outcome["text"]
            assert "raise make_error()" in outcome["text"]
            assert outcome["text"].rstrip().endswith("ValueError: boom")


def fail_on_all_but_the_coordinator(case):
    ranks = case.join()

    def map_fun():
        if ranks.is_coordinator:
            return 0
        raise ValueError(f"boom on {ranks.rank}")

    return {kind: caught(lambda kind=kind: run_step(ranks, kind, map_fun, list)) for kind in ON_ALL_RANKS}


def test_the_errors_of_all_ranks_that_failed_are_reported_in_order(ranks: RankPool):
    for outcomes in Case(4, None, 1).run(ranks, fail_on_all_but_the_coordinator):
        for outcome in outcomes.values():
            assert [(rank, text) for rank, (_, text, _) in outcome["failures"].items()] == [
                (0, "boom on 0"),
                (2, "boom on 2"),
                (3, "boom on 3"),
            ]
            assert [outcome["text"].index(f"(RANK {rank})") for rank in (0, 2, 3)] == sorted(
                outcome["text"].index(f"(RANK {rank})") for rank in (0, 2, 3)
            )


def fail_alone(kind, side, make_error):
    return fail(alone(), kind, side, 0, make_error)


@pytest.mark.parametrize(
    ("kind", "side"), [(k, "map") for k in (*ON_ALL_RANKS, "broadcast")] + [(k, "reduce") for k in REDUCING]
)
def test_without_a_group_an_error_is_wrapped_the_same_way(kind, side):
    outcome, next_step = fail_alone(kind, side, boom)
    assert outcome["step"] == "this step"
    assert outcome["failures"][0][:2] == ("ValueError", "boom")
    assert "(RANK 0)" in outcome["text"]
    assert f"{side}_fun" in outcome["failures"][0][2]
    assert next_step == [0]


# --- exceptions that do not travel -------------------------------------------------------------------------------


class HoldsAHandle(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.handle = lambda: None


class TakesOtherArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(f"{detail} ({code})")


class CannotBeShown(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")


class RefusesToBePickled(Exception):
    def __reduce__(self):
        raise RuntimeError("no pickle for you")


class TurnsIntoSomethingElse(Exception):
    def __reduce__(self):
        return str, ("not an exception",)


class TurnsIntoAnotherException(Exception):
    def __reduce__(self):
        return ValueError, ("something else",)


def unpicklable():
    return HoldsAHandle("it broke")


def not_unpicklable():
    return TakesOtherArguments(42, "it broke")


def without_text():
    return CannotBeShown("it broke")


def refusing():
    return RefusesToBePickled("it broke")


def changeling():
    return TurnsIntoSomethingElse("it broke")


def shapeshifter():
    return TurnsIntoAnotherException("it broke")


def known_on_one_rank_only():
    """An instance of a class that other ranks cannot import."""
    module = types.ModuleType("only_on_this_rank")
    module.Local = type("Local", (Exception,), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    return module.Local("it broke")


AWKWARD = [unpicklable, not_unpicklable, without_text, refusing, changeling, shapeshifter, known_on_one_rank_only]


@some_cases
@pytest.mark.parametrize("make_error", AWKWARD)
def test_exceptions_that_do_not_pickle_both_ways_fail_every_rank_without_a_hang(ranks: RankPool, case, make_error):
    type_name = type(make_error()).__name__
    per_rank = case.run(ranks, fail_everywhere, make_error)
    for outcomes in per_rank:
        for (_, _, failing), (outcome, next_step) in outcomes.items():
            assert outcome["type"] == "CheckpointException"
            assert list(outcome["failures"]) == [failing]
            assert f"(RANK {failing})" in outcome["text"]
            assert type_name in outcome["text"]
            if make_error is not without_text:
                assert "it broke" in outcome["text"]
            assert next_step == list(range(case.group_size))


@pytest.mark.parametrize("make_error", AWKWARD)
def test_without_a_group_such_exceptions_are_kept_as_they_are(make_error):
    outcome, _ = fail_alone("all_reduce", "map", make_error)
    assert outcome["failures"][0][0] == type(make_error()).__name__


# --- results that do not travel ----------------------------------------------------------------------------------


def _explode():
    raise RuntimeError("cannot be rebuilt")


class Grenade:
    """Pickles well, and fails where it is unpickled."""

    def __reduce__(self):
        return _explode, ()


def handle():
    return lambda: None


def awkward_results(case, make_result):
    """Every step with one result that does not travel, from each rank or for each rank."""
    ranks = case.join()
    if ranks is None:
        return None
    outcomes = {}

    def attempt(name, function):
        outcomes[name] = caught(function), ranks.all_gather("the next step", lambda: ranks.rank)

    for bad in range(ranks.world_size):

        def map_fun(bad=bad):
            return make_result() if ranks.rank == bad else ranks.rank

        def reduce_fun(values, bad=bad):
            return [make_result() if rank == bad else rank for rank in range(len(values))]

        def number():
            return 0

        attempt(("reduce_scatter", "map", bad), lambda f=map_fun: ranks.reduce_scatter("this step", f, list))
        attempt(("all_reduce", "map", bad), lambda f=map_fun: ranks.all_reduce("this step", f, list))
        attempt(("all_gather", "map", bad), lambda f=map_fun: ranks.all_gather("this step", f))
        attempt(("reduce_scatter", "reduce", bad), lambda f=reduce_fun: ranks.reduce_scatter("this step", number, f))
    attempt(
        ("all_reduce", "reduce", ranks.coordinator_rank),
        lambda: ranks.all_reduce("this step", lambda: 0, lambda values: make_result()),
    )
    attempt(("broadcast", "map", ranks.coordinator_rank), lambda: ranks.broadcast("this step", make_result))
    return outcomes


@some_cases
@pytest.mark.parametrize("make_result", [handle, Grenade])
def test_results_that_do_not_pickle_both_ways_fail_every_rank_without_a_hang(ranks: RankPool, case, make_result):
    per_rank = case.run(ranks, awkward_results, make_result)
    for outcomes in per_rank:
        assert len(outcomes) == 4 * case.group_size + 2
        for place, (outcome, next_step) in outcomes.items():
            assert outcome["type"] == "CheckpointException", place
            assert outcome["step"] == "this step"
            # The same ranks are named everywhere.
            assert outcome["failures"].keys() == per_rank[0][place][0]["failures"].keys(), place
            assert next_step == list(range(case.group_size))


@pytest.mark.parametrize("make_result", [handle, Grenade])
def test_a_result_that_does_not_travel_is_blamed_on_the_rank_that_made_it(ranks: RankPool, make_result):
    for outcomes in Case(3, None, 1).run(ranks, awkward_results, make_result):
        for (_, side, bad), (outcome, _) in outcomes.items():
            if side == "map":
                assert list(outcome["failures"]) == [bad]


def too_few_and_too_many_results(case):
    ranks = case.join()
    few = caught(lambda: ranks.reduce_scatter("this step", lambda: 0, lambda values: values[1:]))
    many = caught(lambda: ranks.reduce_scatter("this step", lambda: 0, lambda values: [*values, 0]))
    none = caught(lambda: ranks.reduce_scatter("this step", lambda: 0, lambda values: None))
    return [few, many, none], ranks.all_gather("the next step", lambda: ranks.rank)


def test_a_wrong_number_of_results_fails_every_rank_without_a_hang(ranks: RankPool):
    for outcomes, next_step in Case(3, None, 1).run(ranks, too_few_and_too_many_results):
        assert [list(outcome["failures"]) for outcome in outcomes] == [[1], [1], [1]]
        assert "2 results for 3 ranks" in outcomes[0]["text"]
        assert "4 results for 3 ranks" in outcomes[1]["text"]
        assert next_step == [0, 1, 2]


# --- interruptions -----------------------------------------------------------------------------------------------


def ctrl_c():
    return KeyboardInterrupt("stop")


def leave():
    return SystemExit(3)


@some_cases
@pytest.mark.parametrize("make_error", [ctrl_c, leave])
def test_an_interruption_keeps_its_type_on_its_rank_and_fails_the_others(ranks: RankPool, case, make_error):
    expected = make_error()
    for rank, outcomes in enumerate(case.run(ranks, fail_everywhere, make_error)):
        for (_, _, failing), (outcome, next_step) in outcomes.items():
            if rank == failing:
                assert outcome == {"type": type(expected).__name__, "args": expected.args}
            else:
                assert outcome["type"] == "CheckpointException"
                assert outcome["failures"][failing][0] == type(expected).__name__
                assert f"(RANK {failing})" in outcome["text"]
            assert next_step == list(range(case.group_size))


@pytest.mark.parametrize("make_error", [ctrl_c, leave])
@pytest.mark.parametrize("kind", [*ON_ALL_RANKS, "broadcast"])
def test_without_a_group_an_interruption_keeps_its_type(kind, make_error):
    outcome, _ = fail_alone(kind, "map", make_error)
    assert outcome == {"type": type(make_error()).__name__, "args": make_error().args}


class InterruptsPickling:
    def __reduce__(self):
        raise KeyboardInterrupt("stop")


def interrupted_while_pickling(case):
    ranks = case.join()
    outcomes = []
    for kind in ("reduce_scatter", "all_reduce", "all_gather"):

        def map_fun():
            return InterruptsPickling() if ranks.rank == 0 else ranks.rank

        outcomes.append(caught(lambda kind=kind, f=map_fun: run_step(ranks, kind, f, list)))
    return outcomes, ranks.all_gather("the next step", lambda: ranks.rank)


def test_an_interruption_while_a_result_is_packed_keeps_its_type_too(ranks: RankPool):
    (first, next_step), (second, _) = Case(2, None, 1).run(ranks, interrupted_while_pickling)
    assert [outcome["type"] for outcome in first] == ["KeyboardInterrupt"] * 3
    assert [outcome["type"] for outcome in second] == ["CheckpointException"] * 3
    assert next_step == [0, 1]


# --- the caller's own errors -------------------------------------------------------------------------------------


def own_errors(case, make_error):
    ranks = case.join()
    outcomes = []
    for failing in range(ranks.world_size):

        def map_fun(failing=failing):
            if ranks.rank == failing:
                raise make_error()

        outcomes.append(caught(lambda f=map_fun: ranks.own_error_first("this step", f)))
    return outcomes, ranks.all_gather("the next step", lambda: ranks.rank)


@pytest.mark.parametrize("make_error", [boom, unpicklable, not_unpicklable, ctrl_c])
def test_a_callers_own_error_goes_on_where_it_was_raised_and_fails_the_others(ranks: RankPool, make_error):
    expected = make_error()
    for rank, (outcomes, next_step) in enumerate(Case(3, None, 1).run(ranks, own_errors, make_error)):
        for failing, outcome in enumerate(outcomes):
            if rank == failing:
                assert outcome == {"type": type(expected).__name__, "args": expected.args}
            else:
                assert outcome["type"] == "CheckpointException"
                assert list(outcome["failures"]) == [failing]
        assert next_step == [0, 1, 2]


def test_without_a_group_a_callers_own_error_is_not_wrapped():
    def raises():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        alone().own_error_first("this step", raises)


# --- helpers -----------------------------------------------------------------------------------------------------


def test_failures_are_found_among_results_by_position():
    wrapped = wrap_exception(ValueError("boom"))
    assert failures_of([1, wrapped, (ValueError(), "no stack"), None, wrapped]) == {1: wrapped, 4: wrapped}


def test_a_checkpoint_exception_is_an_exception_and_survives_pickling():
    with pytest.raises(Exception, match="RANK 0") as caught_error:
        alone().all_reduce("this step", lambda: 1 / 0, sum)
    error = caught_error.value
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) is CheckpointException
    assert str(copy) == str(error)
    assert copy.args[0] == "this step"
    assert isinstance(copy.failures[0][0], ZeroDivisionError)


# --- steps as blocks ----------------------------------------------------------------------------------------------


def run_a_block(case: Case, failing: tuple[int, ...]) -> Any:
    ranks = case.join()
    if ranks is None:
        return None
    done = []
    try:
        with ranks.step("write"):
            done.append(ranks.rank)
            if ranks.rank in failing:
                raise FileNotFoundError(f"of rank {ranks.rank}")
    except CheckpointException as error:
        trace = [frame.name for frame in StackSummary.from_list(error.failures[failing[0]][1])]
        return done, error.args[0], {rank: repr(cause) for rank, (cause, _) in error.failures.items()}, trace[-1]
    return done, ranks.rank


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_block_that_all_ranks_run_ends_on_all_of_them(ranks: RankPool, case):
    assert case.run(ranks, run_a_block, ()) == [([rank], rank) for rank in range(case.group_size)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_block_that_fails_on_some_ranks_raises_the_same_on_all(ranks: RankPool, case):
    failing = tuple(range(case.group_size))[-2:]
    for rank, (done, text, causes, innermost) in enumerate(case.run(ranks, run_a_block, failing)):
        assert done == [rank]  # the block ran, and nothing was exchanged before
        assert text == "write"
        assert causes == {failed: f"FileNotFoundError('of rank {failed}')" for failed in failing}
        assert innermost == "run_a_block"  # the story, not the plumbing


def test_an_interruption_of_a_block_stays_one():
    ranks = Collectives(None, False, 0)
    with pytest.raises(KeyboardInterrupt), ranks.step("write"):
        raise KeyboardInterrupt


def test_a_block_returns_what_it_returns():
    def inside() -> int:
        with Collectives(None, False, 0).step("read"):
            return 7

    assert inside() == 7
