"""Retention: what policies keep, and what stays whatever they say."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import keep
from holdfast._manager.retention import Policy, always_kept, plan_deletions
from holdfast._manager.steps import StepInfo
from tests.properties import examples

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


def step(number: int, *, hours: float | None = 0, nbytes: int = 10, loss: float | None = None, **changes) -> StepInfo:
    saved_at = None if hours is None else NOW - timedelta(hours=hours)
    metrics = {} if loss is None else {"loss": loss}
    return StepInfo(
        number, f"step-{number}", saved_at=saved_at, nbytes=nbytes, metrics=metrics, **{"is_ours": True, **changes}
    )


def deleted(policy: Policy, steps: list[StepInfo]) -> list[int]:
    return [info.step for info in plan_deletions(steps, policy, NOW)]


# --- single policies ----------------------------------------------------------------------------------------------


def test_everything_is_everything():
    assert deleted(keep.everything(), [step(number) for number in range(5)]) == []


def test_last_counts_by_the_number_of_the_step():
    assert deleted(keep.last(2), [step(number) for number in (7, 100, 30, 2)]) == [2, 7]
    assert deleted(keep.last(9), [step(number) for number in range(5)]) == []


def test_best_takes_the_smallest_or_the_largest():
    steps = [step(1, loss=3.0), step(2, loss=1.0), step(3, loss=2.0), step(4, loss=5.0)]
    assert deleted(keep.best(1, "loss"), steps) == [1, 3]
    assert deleted(keep.best(2, "loss"), steps) == [1]
    assert deleted(keep.best(1, "loss", "max"), [*steps, step(5, loss=0.0)]) == [1, 2, 3]


def test_of_equally_good_ones_the_newer_stays():
    assert deleted(keep.best(1, "loss"), [step(1, loss=1.0), step(2, loss=1.0), step(3, loss=2.0)]) == [1]


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_loss_that_is_no_number_is_never_the_best(nothing, mode):
    steps = [step(1, loss=nothing), step(2, loss=7.0), step(3, loss=nothing), step(4)]
    assert deleted(keep.best(1, "loss", mode), steps) == [1, 3]


def test_every_keeps_the_multiples():
    steps = [step(number) for number in range(0, 3100, 500)]
    assert deleted(keep.every(1000), steps) == [500, 1500, 2500]


def test_every_keeps_the_first_after_each_multiple_if_saves_go_by_the_clock():
    steps = [step(number) for number in (430, 870, 1310, 1750, 2190, 2630, 5100, 5200)]
    assert deleted(keep.every(1000), steps) == [430, 870, 1750, 2630]


def test_newer_than_goes_by_the_time_of_the_save():
    ages = {1: 5, 2: 2, 3: 1.5, 4: 0.9, 5: 0.4, 6: None, 7: 9}
    steps = [step(number, hours=hours) for number, hours in ages.items()]
    assert deleted(keep.newer_than(timedelta(hours=2)), steps) == [1, 2]


# --- joined and limited -------------------------------------------------------------------------------------------


def test_joined_policies_keep_what_any_of_them_keeps():
    steps = [step(500, loss=0.1), *(step(number, loss=1.0) for number in range(1000, 5001, 500))]
    policy = keep.last(2) | keep.best(1, "loss") | keep.every(2000)
    assert policy.kept(steps, NOW) == {
        500: "best 1 by loss",
        2000: "every 2000",
        4000: "every 2000",
        4500: "last 2",
        5000: "newest, last 2",
    }


def test_an_age_limits_what_the_rules_keep():
    steps = [step(1, hours=50, loss=0.0), step(2, hours=30), step(3, hours=10), step(4, hours=1), step(5)]
    assert deleted(keep.best(1, "loss").within(max_age=timedelta(days=2)), steps) == [1, 2, 3, 4]
    assert deleted(keep.everything().within(max_age=timedelta(days=1)), steps) == [1, 2]


def test_bytes_limit_what_the_rules_keep_and_the_oldest_go_first():
    steps = [step(1, nbytes=40), step(2, nbytes=30), step(3, nbytes=20), step(4, nbytes=10)]
    assert deleted(keep.everything().within(max_bytes=100), steps) == []
    assert deleted(keep.everything().within(max_bytes=99), steps) == [1]
    assert deleted(keep.everything().within(max_bytes="59 B"), steps) == [1, 2]
    assert deleted(keep.everything().within(max_bytes=1), steps) == [1, 2, 3]


def test_bytes_of_what_cannot_go_count_too():
    steps = [step(1, nbytes=40, pinned=True), step(2, nbytes=30), step(3, nbytes=20), step(4, nbytes=10)]
    assert deleted(keep.everything().within(max_bytes=70), steps) == [2]
    assert deleted(keep.last(1).within(max_bytes=10**9), steps) == [2, 3]
    assert deleted(keep.last(2).within(max_bytes=60), steps) == [2, 3]


def test_no_limit_changes_nothing():
    policy = keep.last(3)
    assert policy.within() is policy


def test_a_limit_is_of_the_policies_before_it():
    steps = [step(1, hours=50), step(2, hours=50), step(3), step(5), step(7)]
    assert deleted(keep.last(5).within(max_age=timedelta(days=1)) | keep.every(2), steps) == [1]


# --- clocks -------------------------------------------------------------------------------------------------------

YEAR = 24 * 365


@pytest.mark.parametrize("leap", [25, 47, 2 * 24, YEAR, 100 * YEAR])
@pytest.mark.parametrize(
    "policy", [keep.newer_than(timedelta(days=2)), keep.last(20).within(max_age=timedelta(days=2))]
)
def test_saves_of_a_clock_that_is_far_ahead_delete_only_what_is_old_without_it(policy, leap):
    right = [step(number, hours=leap + 60 - 10 * number) for number in range(1, 7)]
    assert deleted(policy, [*right, step(7)]) == [1]
    assert deleted(policy, [*right, step(7, hours=0.1), step(8)]) == [1]
    assert deleted(policy, right) == [1]  # and nothing was saved by it yet


def test_after_a_pause_the_third_save_has_the_old_ones_deleted():
    old = [step(number, hours=YEAR - number) for number in range(1, 7)]
    policy = keep.everything().within(max_age=timedelta(days=2))
    assert deleted(policy, [*old, step(7, hours=0.2), step(8, hours=0.1)]) == []
    assert deleted(policy, [*old, step(7, hours=0.2), step(8, hours=0.1), step(9)]) == [1, 2, 3, 4, 5, 6]


def test_a_time_to_come_is_no_reason_to_delete_and_no_witness():
    policy = keep.everything().within(max_age=timedelta(days=2))
    ahead = [step(7, hours=-YEAR), step(8, hours=-YEAR - 1), step(9, hours=-YEAR - 2)]
    assert deleted(policy, [*(step(number, hours=60 - 10 * number) for number in range(1, 7)), *ahead, step(10)]) == [1]
    assert deleted(policy, [*(step(number, hours=80 - 10 * number) for number in range(1, 7)), *ahead]) == [1, 2, 3]


def test_a_clock_that_was_set_back_deletes_nothing():
    steps = [step(number, hours=-YEAR) for number in range(1, 5)]
    assert deleted(keep.newer_than(timedelta(hours=1)), [*steps, step(5)]) == []


def test_saves_that_are_further_apart_than_they_are_kept_do_not_pile_up():
    steps = [step(number, hours=70 - 10 * number) for number in range(1, 8)]
    assert deleted(keep.newer_than(timedelta(hours=3)), steps) == [1, 2, 3, 4, 5]
    assert deleted(keep.newer_than(timedelta(hours=15)), steps) == [1, 2, 3, 4]
    assert deleted(keep.newer_than(timedelta(hours=25)), steps) == [1, 2, 3, 4]
    minutes = [step(number, hours=(70 - 10 * number) / 60) for number in range(1, 8)]
    assert deleted(keep.newer_than(timedelta(minutes=3)), minutes) == [1, 2, 3, 4, 5, 6]


# --- what always stays --------------------------------------------------------------------------------------------


def test_what_is_pinned_set_aside_unreadable_or_of_others_is_never_deleted():
    steps = [
        step(1, pinned=True),
        step(2, set_aside="damaged"),
        step(3, is_ours=False),
        step(4, damage="cut off", is_ours=False),
        step(5),
        step(6),
    ]
    assert keep.last(1).kept(steps, NOW) == {
        1: "pinned",
        2: "set aside",
        3: "not saved by this run",
        4: "cannot be read",
        6: "newest, last 1",
    }


def test_what_cannot_be_used_does_not_count_as_one_of_the_last():
    steps = [step(1), step(2), step(3, set_aside="damaged"), step(4, is_ours=False)]
    assert deleted(keep.last(2), steps) == []
    assert deleted(keep.last(1), steps) == [1]


def test_after_a_return_to_an_earlier_step_what_was_saved_last_stays_too():
    steps = [step(300, hours=9), step(400, hours=1), step(500, hours=5), step(600, hours=4)]
    assert deleted(keep.last(1), steps) == [300, 500]


# --- what policies are made of ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 1.0, True, "3", None])
@pytest.mark.parametrize(
    "make", [keep.last, keep.every, lambda number: keep.best(number, "loss")], ids=["last", "every", "best"]
)
def test_a_number_that_is_none_is_refused(make, number):
    with pytest.raises(ValueError, match="whole number"):
        make(number)


@pytest.mark.parametrize("age", [3600, "1h", None])
def test_an_age_is_a_timedelta(age):
    with pytest.raises(TypeError, match="timedelta"):
        keep.newer_than(age)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="'min'"):
        keep.best(1, "loss", "smallest")
    with pytest.raises(ValueError, match="must be positive, got"):
        keep.newer_than(timedelta(0))
    with pytest.raises(TypeError, match="max_age"):
        keep.last(1).within(max_age=3600)
    with pytest.raises(ValueError, match="max_bytes"):
        keep.last(1).within(max_bytes=0)
    with pytest.raises(TypeError):
        keep.last(1) | 3


def test_a_policy_of_ones_own():
    class Primes(Policy):
        def choose(self, steps, now):
            return {info.step: "prime" for info in steps if info.step in (2, 3, 5, 7)}

    assert deleted(Primes() | keep.last(1), [step(number) for number in range(10)]) == [0, 1, 4, 6, 8]


# --- properties ---------------------------------------------------------------------------------------------------

FEW = settings(max_examples=examples(50))
hours = st.none() | st.integers(-2, 30)
infos = st.builds(
    step,
    st.integers(0, 40),
    hours=hours,
    nbytes=st.integers(0, 30),
    loss=st.none() | st.sampled_from([math.nan, math.inf, 0.0, 1.0, 2.0, -1.5]),
    pinned=st.booleans(),
    set_aside=st.sampled_from([None, None, None, "damaged"]),
    damage=st.sampled_from([None, None, None, "cut off"]),
    is_ours=st.sampled_from([True, True, True, False]),
)
listings = st.lists(infos, unique_by=lambda info: info.step, max_size=12).map(
    lambda found: sorted(found, key=lambda info: info.step)
)
simple = st.one_of(
    st.builds(keep.last, st.integers(1, 4)),
    st.builds(keep.best, st.integers(1, 3), st.just("loss"), st.sampled_from(["min", "max"])),
    st.builds(keep.every, st.integers(1, 15)),
    st.builds(keep.newer_than, st.integers(1, 30).map(lambda count: timedelta(hours=count))),
    st.just(keep.everything()),
)
limits = st.fixed_dictionaries(
    {},
    optional={
        "max_age": st.integers(1, 30).map(lambda count: timedelta(hours=count)),
        "max_bytes": st.integers(1, 200),
    },
)
policies = st.recursive(
    simple,
    lambda inner: (
        st.builds(lambda one, other: one | other, inner, inner)
        | st.builds(lambda policy, limit: policy.within(**limit), inner, limits)
    ),
    max_leaves=4,
)


@FEW
@given(listings, policies)
def test_nothing_is_deleted_that_must_stay(steps, policy):
    doomed = plan_deletions(steps, policy, NOW)
    good = [info for info in steps if info.is_ours and info.is_usable]
    assert all(info.is_ours and info.is_usable and not info.pinned for info in doomed)
    if good:
        timed = [info for info in good if info.saved_at is not None]
        stay = [info for info in good if info not in doomed]
        assert max(good, key=lambda info: info.step) in stay
        assert not timed or max(timed, key=lambda info: (info.saved_at, info.step)) in stay


@FEW
@given(listings, policies)
def test_every_step_is_either_kept_for_a_reason_or_deleted(steps, policy):
    kept, doomed = policy.kept(steps, NOW), plan_deletions(steps, policy, NOW)
    assert sorted([*kept, *(info.step for info in doomed)]) == [info.step for info in steps]
    assert all(kept.values())
    assert [info.step for info in doomed] == sorted(info.step for info in doomed)


@FEW
@given(listings, policies)
def test_once_all_is_deleted_there_is_nothing_more_to_delete(steps, policy):
    doomed = plan_deletions(steps, policy, NOW)
    left = [info for info in steps if info not in doomed]
    assert plan_deletions(left, policy, NOW) == []


@FEW
@given(listings, policies, st.randoms())
def test_the_order_of_the_list_does_not_matter(steps, policy, random):
    shuffled = steps.copy()
    random.shuffle(shuffled)
    assert plan_deletions(shuffled, policy, NOW) == plan_deletions(steps, policy, NOW)


@FEW
@given(listings, policies, policies)
def test_a_policy_more_never_deletes_more(steps, one, other):
    joined = {info.step for info in plan_deletions(steps, one | other, NOW)}
    apart = [{info.step for info in plan_deletions(steps, policy, NOW)} for policy in (one, other)]
    assert joined == apart[0] & apart[1]


@FEW
@given(listings, policies, limits)
def test_a_limit_never_keeps_more_and_is_kept(steps, policy, limit):
    before, after = policy.kept(steps, NOW), policy.within(**limit).kept(steps, NOW)
    assert after.keys() <= before.keys()
    good = [info for info in steps if info.is_ours and info.is_usable]
    removable = [info for info in good if info.step in after and info.step not in always_kept(good)]
    if "max_age" in limit:
        ages = sorted(NOW - info.saved_at for info in good if info.saved_at is not None and info.saved_at <= NOW)
        behind = [timedelta(0), *ages[:3]]
        leap = max(limit["max_age"] / 2, timedelta(hours=1))
        leaps = (later for later, sooner in zip(behind[1:], behind, strict=False) if later - sooner >= leap)
        oldest = limit["max_age"] + next(leaps, timedelta(0))
        assert all(info.saved_at is None or NOW - info.saved_at < oldest for info in removable)
    if "max_bytes" in limit and removable:
        assert sum(info.nbytes for info in good if info.step in after) <= limit["max_bytes"]


@FEW
@given(listings, policies, limits)
def test_a_limit_deletes_no_more_than_it_has_to(steps, policy, limit):
    if "max_bytes" not in limit:
        return
    aged = policy.within(max_age=limit.get("max_age")).kept(steps, NOW)
    after = policy.within(**limit).kept(steps, NOW)
    gone = [info for info in steps if info.step in aged and info.step not in after]
    if gone:
        good = [info for info in steps if info.is_ours and info.is_usable and info.step in after]
        assert sum(info.nbytes for info in [*good, gone[-1]]) > limit["max_bytes"]
