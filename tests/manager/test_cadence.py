"""Ranks with clocks, step times and signals of their own decide alike, at the same step, and in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast._manager.cadence import Beat, Cadence, Decision
from holdfast._manager.preemption import Preemption
from holdfast.errors import RankDisagreementError


@dataclass
class Rank:
    """One simulated rank: the seconds that its steps take, and how its clock shows the time."""

    seconds: list[float]
    clock_ahead: float = 0.0
    clock_speed: float = 1.0
    signal_at: float | None = None
    grace: float | None = None
    now: float = 0.0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def clock(self) -> float:
        return self.clock_ahead + self.clock_speed * self.now


class Meeting:
    """The exchanges of ranks. Fails if they are not at the same steps, or if one waits for another that ended."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.rounds: list[dict[int, tuple[int, Beat]]] = []
        self.times: list[float] = []
        self._taken = [0] * len(ranks)
        self._changed = threading.Condition()
        self._somebody_ended = False

    def exchange(self, rank: int, step: int, beat: Beat) -> list[Beat]:
        with self._changed:
            number = self._taken[rank]
            self._taken[rank] += 1
            if number == len(self.rounds):
                self.rounds.append({})
                self.times.append(0.0)
            table = self.rounds[number]
            table[rank] = (step, beat)
            self.times[number] = max(self.times[number], self.ranks[rank].now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(table) == len(self.ranks) or self._somebody_ended)
            steps = {each: at for each, (at, _) in table.items()}
            assert len(table) == len(self.ranks), f"only these ranks came to exchange {number}: {steps}"
            assert len(set(steps.values())) == 1, f"exchange {number} is at different steps: {steps}"
            self.ranks[rank].now = self.times[number]  # whoever is early waits for the others
            return [table[each][1] for each in range(len(self.ranks))]

    def ended(self) -> None:
        with self._changed:
            self._somebody_ended = True
            self._changed.notify_all()


def train(ranks: list[Rank], steps: list[int], **options) -> Meeting:
    """Run all ranks through ``steps``, each in a thread, and keep what they decide."""
    meeting = Meeting(ranks)
    errors: list[BaseException] = []

    def run(number: int, rank: Rank) -> None:
        try:
            preemption = Preemption([], grace_seconds=rank.grace, clock=rank.clock)
            cadence = Cadence(
                **options,
                preemption=preemption,
                exchange=lambda step, beat: meeting.exchange(number, step, beat),
                clock=rank.clock,
            )
            for step, seconds in zip(steps, rank.seconds, strict=True):
                rank.now += seconds
                if rank.signal_at is not None and rank.now >= rank.signal_at:
                    preemption.note("SIGTERM")
                decision = cadence.at_step(step)
                rank.decisions.append((rank.now, decision))
        except BaseException as error:
            errors.append(error)
        finally:
            meeting.ended()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return meeting


def reasons(rank: Rank) -> list[str | None]:
    return [decision.save for _, decision in rank.decisions]


STEPS = st.one_of(
    st.integers(1, 120).map(lambda count: list(range(1, count + 1))),
    st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True).map(sorted),
    st.lists(st.integers(0, 50), min_size=1, max_size=60),  # back and forth, and twice the same
)


@st.composite
def trainings(draw) -> tuple[list[Rank], list[int]]:
    steps = draw(STEPS)
    pace = draw(st.sampled_from([0.001, 0.05, 0.7, 20.0]))
    jitter = st.sampled_from([1.0, 1.0, 1.0, 0.1, 3.0, 200.0])
    ranks = [
        Rank(
            seconds=[pace * draw(jitter) for _ in steps],
            clock_ahead=draw(st.floats(-1e6, 1e6)),
            clock_speed=draw(st.floats(0.5, 2)),
            signal_at=draw(st.one_of(st.none(), st.floats(0, 1.2 * pace * len(steps)))),
            grace=draw(st.one_of(st.none(), st.floats(0.5, 300))),
        )
        for _ in range(draw(st.integers(2, 3)))
    ]
    return ranks, steps


@given(trainings(), st.one_of(st.none(), st.integers(1, 40)), st.one_of(st.none(), st.floats(0.01, 2)))
def test_all_ranks_decide_alike_whatever_their_clocks_show(training, every_steps, every_minutes) -> None:
    ranks, steps = training
    train(ranks, steps, every_steps=every_steps, every_minutes=every_minutes)
    for other in ranks[1:]:
        for (_, mine), (_, theirs) in zip(ranks[0].decisions, other.decisions, strict=True):
            assert replace(mine, seconds_left=None) == replace(theirs, seconds_left=None)
            assert (mine.seconds_left is None) == (theirs.seconds_left is None)


def reaches_a_multiple(last: int | None, step: int, every: int) -> bool:
    if last is None or step < last:
        last = step - 1
    return any(number % every == 0 for number in range(last + 1, step + 1))


@given(STEPS, st.integers(1, 40))
def test_steps_are_counted_by_their_numbers_even_if_some_are_left_out(steps, every) -> None:
    cadence = Cadence(every_steps=every)
    found = [cadence.at_step(step).save for step in steps]
    expected = [reaches_a_multiple(last, step, every) for last, step in zip([None, *steps], steps, strict=False)]
    assert found == ["steps" if each else None for each in expected]


def test_steps_alone_need_no_exchange() -> None:
    def exchange(step: int, beat: Beat) -> list[Beat]:
        raise AssertionError("the ranks had nothing to tell each other")

    cadence = Cadence(every_steps=3, exchange=exchange)
    assert [cadence.at_step(step).save for step in range(1, 7)] == [None, None, "steps"] * 2


@given(
    step_seconds=st.integers(1, 50_000).map(lambda milliseconds: milliseconds / 1000),
    minutes=st.floats(0.02, 3),
    speed=st.floats(0.5, 2),
    every_steps=st.one_of(st.none(), st.integers(1, 60)),
)
@example(step_seconds=0.001, minutes=0.05, speed=1.0, every_steps=None)
@example(step_seconds=0.1, minutes=0.05, speed=1.0, every_steps=29)
@example(step_seconds=0.3, minutes=0.02, speed=2.0, every_steps=None)
def test_a_save_by_time_comes_at_the_first_step_that_rank_0_finds_it_due(
    step_seconds, minutes, speed, every_steps
) -> None:
    """For steps of the same length. The clock of rank 1 shows anything, and is never asked."""
    count = min(4000, int(3 * minutes * 60 / step_seconds) + 5)
    ranks = [
        Rank([step_seconds] * count, clock_ahead=500.0),
        Rank([step_seconds] * count, clock_ahead=-7.0, clock_speed=speed),
    ]
    steps = list(range(1, count + 1))
    train(ranks, steps, every_minutes=minutes, every_steps=every_steps)
    expected: list[str | None] = []
    saved_at, now = 500.0, 0.0
    for step in steps:
        now += step_seconds
        clock = 500.0 + 1.0 * now
        if every_steps is not None and step % every_steps == 0:
            expected.append("steps")
        elif saved_at + minutes * 60 - clock <= 0:
            expected.append("minutes")
        else:
            expected.append(None)
        if expected[-1] is not None:
            saved_at = clock
    assert reasons(ranks[0]) == reasons(ranks[1]) == expected


@given(
    step_seconds=st.integers(1, 5000).map(lambda milliseconds: milliseconds / 1000),
    stride=st.sampled_from([1, 10, 4096]),
    who=st.integers(0, 2),
    when=st.floats(0, 1),
    grace=st.one_of(st.none(), st.floats(1, 100)),
)
def test_a_signal_on_any_rank_stops_all_of_them_about_a_second_later(step_seconds, stride, who, when, grace) -> None:
    count = 300
    signal_at = when * (count - 1) * step_seconds
    ranks = [Rank([step_seconds] * count, clock_ahead=100.0 * rank, grace=grace) for rank in range(3)]
    ranks[who].signal_at = signal_at
    train(ranks, [1 + stride * each for each in range(count)])
    between = 1.0 if grace is None else min(1.0, grace / 10)
    for rank in ranks:
        stopped_at = next((now for now, decision in rank.decisions if decision.stop), None)
        if stopped_at is None:  # the training was over before the next exchange
            assert signal_at + max(between, step_seconds) > rank.decisions[-1][0] - 1e-6
            continue
        assert signal_at <= stopped_at <= signal_at + max(between, step_seconds) + 1e-6
        at_stop = [decision for now, decision in rank.decisions if now == stopped_at]
        assert [(each.save, each.cause) for each in at_stop] == [("preemption", f"SIGTERM on rank {who}")]
        assert reasons(rank).count("preemption") == 1


def test_steps_that_get_slow_all_at_once_cannot_put_an_exchange_off_for_long() -> None:
    ranks = [Rank([0.0001] * 200 + [30.0] * 200) for _ in range(2)]
    meeting = train(ranks, list(range(400)))
    at = [table[0][0] for table in meeting.rounds]
    assert max(later - earlier for earlier, later in zip(at, [*at[1:], 400], strict=True)) <= 100
    announced_before, *others = [step for step in at if step >= 200]
    assert others == list(range(announced_before + 1, 400))


def test_exchanges_are_rare() -> None:
    ranks = [Rank([0.01] * 6000) for _ in range(2)]
    meeting = train(ranks, list(range(6000)))  # a minute of training
    assert len(meeting.rounds) < 75


def test_all_ranks_get_the_shortest_time_that_one_has_left() -> None:
    ranks = [Rank([1.0] * 10, grace=grace, clock_ahead=grace) for grace in (90.0, 40.0, 60.0)]
    ranks[1].signal_at = ranks[2].signal_at = 4.5
    train(ranks, list(range(10)))
    for rank in ranks:
        assert [decision.seconds_left for _, decision in rank.decisions[:4]] == [None] * 4
        assert [decision.seconds_left for _, decision in rank.decisions[4:]] == pytest.approx([40, 39, 38, 37, 36, 35])
        assert {decision.cause for _, decision in rank.decisions[4:]} == {"SIGTERM on rank 1"}


def test_when_all_have_agreed_to_stop_they_exchange_no_more() -> None:
    ranks = [Rank([1.0] * 20) for _ in range(2)]
    ranks[1].signal_at = 4.5
    meeting = train(ranks, list(range(20)))
    assert [table[0][0] for table in meeting.rounds] == [0, 1, 2, 3, 4]
    assert all(decision.stop for _, decision in ranks[0].decisions[4:])


def test_saves_by_steps_and_minutes_go_on_after_a_signal_that_the_program_ignores() -> None:
    ranks = [Rank([1.0] * 20) for _ in range(2)]
    ranks[1].signal_at = 2.5
    train(ranks, list(range(1, 21)), every_steps=5, every_minutes=3 / 60)
    expected = {3: "preemption", 5: "steps", 8: "minutes", 10: "steps", 13: "minutes", 15: "steps", 18: "minutes"}
    assert reasons(ranks[0]) == reasons(ranks[1]) == [{**expected, 20: "steps"}.get(step) for step in range(1, 21)]


def test_ranks_at_different_steps_get_an_error() -> None:
    mine = Cadence(every_minutes=1, exchange=lambda step, beat: [beat, replace(beat, step=8)])
    with pytest.raises(RankDisagreementError, match=r"step 7.*step 8.*same steps") as error:
        mine.at_step(7)
    assert error.value.views == {0: "step 7", 1: "step 8"}


class Alone:
    """One process that decides by itself, and its clock."""

    def __init__(self, **options) -> None:
        self.now = 0.0
        self.preemption = Preemption([], grace_seconds=30, clock=self.clock)
        self.cadence = Cadence(**options, preemption=self.preemption, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def at(self, now: float, step: int) -> Decision:
        self.now = now
        return self.cadence.at_step(step)


def test_a_process_alone_notices_a_signal_at_the_very_next_step() -> None:
    alone = Alone()
    assert [alone.at(0.001 * step, step) for step in range(1, 300)] == [Decision()] * 299
    alone.preemption.note("SIGUSR1")
    assert alone.at(10.0, 300) == Decision("preemption", True, "SIGUSR1", pytest.approx(30 - 10 + 0.299))
    assert alone.cadence.should_stop
    assert alone.at(20.0, 301).save is None
    assert alone.at(90.0, 302) == Decision(None, True, "SIGUSR1", 0.0)


def test_a_save_for_another_reason_gives_the_minutes_a_full_interval_again() -> None:
    alone = Alone(every_minutes=1)
    assert alone.at(59, 1).save is None
    alone.cadence.restart_minutes()
    assert [alone.at(now, now).save for now in (60, 118, 119, 120)] == [None, None, "minutes", None]


def test_a_resumed_training_saves_the_next_multiple_and_not_what_is_saved_already() -> None:
    alone = Alone(every_steps=100, every_minutes=1)
    alone.now = 50
    alone.cadence.resume_after(200)
    assert [alone.at(70, step).save for step in (200, 201, 299)] == [None] * 3
    assert alone.at(109, 299).save is None  # the minutes began when the training went on
    assert alone.at(109, 310).save == "steps"


def test_going_back_makes_the_ranks_exchange_at_once() -> None:
    exchanged: list[int] = []

    def exchange(step: int, beat: Beat) -> list[Beat]:
        exchanged.append(step)
        return [beat, beat]

    now = [0.0]
    cadence = Cadence(every_minutes=1, exchange=exchange, clock=lambda: now[0])
    for step in range(1000, 1040):
        now[0] += 0.001
        cadence.at_step(step)
    assert len(exchanged) < 10
    announced_far_away = exchanged[-1]
    cadence.at_step(5)
    assert exchanged[-1] == 5
    cadence.resume_after(2)
    cadence.at_step(3)
    assert exchanged[-2:] == [5, 3]
    assert announced_far_away >= 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_steps": 0}, "every_steps=0"), ({"every_minutes": 0}, "=0 "), ({"every_minutes": float("nan")}, "=nan")],
)
def test_intervals_that_make_no_sense_are_refused(options: dict, message: str) -> None:
    make: Callable[..., Cadence] = Cadence
    with pytest.raises(ValueError, match=f"{message}.*or None for never"):
        make(**options)
