"""Calls, their phases, and who gets their events."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast._watching.calls import Call, Update, busiest
from holdfast._watching.subscribers import subscriptions
from holdfast.watching import Event, about, subscribe


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    with subscribe(seen.append):
        yield seen


def test_every_phase_and_the_whole_are_reported_with_their_numbers(events: list[Event]) -> None:
    before = time.time()
    call = Call("save", "runs/a/step-7", 7, rank=1, world_size=4)
    with call.phase("plan"):
        pass
    with call.phase("write", nbytes=10) as seen:
        seen.nbytes += 90
        seen.slowest_rank = 3
        seen.detail["files"] = 2
    call.finish(nbytes=400, slowest_rank=2, stalled=0.25)
    after = time.time()

    plan, write, whole = events
    assert [event.name for event in events] == ["save.plan", "save.write", "save"]
    assert {(event.path, event.step, event.rank, event.world_size) for event in events} == {("runs/a/step-7", 7, 1, 4)}
    assert {event.call for event in events} == {call.id}
    assert (plan.nbytes, plan.slowest_rank, plan.detail) == (0, None, {})
    assert (write.nbytes, write.slowest_rank, write.detail) == (100, 3, {"files": 2})
    assert (whole.nbytes, whole.slowest_rank, whole.detail, whole.is_whole) == (400, 2, {"stalled": 0.25}, True)
    assert before - 1 <= whole.began == whole.call_began == plan.call_began <= plan.began <= write.began <= after + 1
    assert seen.seconds == write.seconds
    assert write.began + write.seconds <= whole.began + whole.seconds + 1e-6


def test_a_call_that_began_earlier_says_so(events: list[Event]) -> None:
    started = time.perf_counter() - 100.0

    Call("load", "a", started=started).finish()

    assert 100.0 <= events[0].seconds < 200.0
    assert events[0].began <= time.time() - 99.0


def test_a_phase_that_fails_is_reported_and_raised(events: list[Event]) -> None:
    with pytest.raises(OSError, match="disk on fire"), Call("save", "a") as call, call.phase("write"):
        raise OSError("disk on fire")

    assert [(event.name, event.error) for event in events] == [
        ("save.write", "OSError: disk on fire"),
        ("save", "OSError: disk on fire"),
    ]


def test_an_error_that_has_no_text_is_reported_by_its_name(events: list[Event]) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not a word")

    Call("save", "a").finish(error=MuteError())
    Call("save", "a").finish(error=KeyboardInterrupt())
    Call("save", "a").finish(error="in words")

    assert [event.error for event in events] == ["MuteError", "KeyboardInterrupt", "in words"]


def test_a_call_ends_once(events: list[Event]) -> None:
    with Call("save", "a") as call:
        call.finish(nbytes=5)
        call.finish(nbytes=6, error="later")

    assert [(event.name, event.nbytes, event.error) for event in events] == [("save", 5, None)]


def test_calls_tell_what_is_known_around_them(events: list[Event]) -> None:
    with about(step=500, reason="steps"):
        with about(final=True):
            inner = Call("save", "a")
        own = Call("save", "a", step=501)
    outside = Call("save", "a")
    # Another thread, and after the block: as with a save in the background.
    thread = threading.Thread(target=lambda: inner.finish(stalled=1.0))
    thread.start()
    thread.join()
    own.finish(reason="asked")
    outside.finish()

    assert [(event.step, event.detail) for event in events] == [
        (500, {"reason": "steps", "final": True, "stalled": 1.0}),
        (501, {"reason": "asked"}),
        (None, {}),
    ]


def test_calls_that_overlap_in_threads_are_kept_apart(events: list[Event]) -> None:
    meeting = threading.Barrier(4)

    def save(number: int) -> None:
        with Call("save", f"step-{number}", step=number) as call:
            for phase in ("plan", "write", "commit"):
                with call.phase(phase):
                    meeting.wait(10)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number in range(4):
        own = [event for event in events if event.path == f"step-{number}"]
        assert [event.phase for event in own] == ["plan", "write", "commit", ""]
        assert {event.step for event in own} == {number}
        assert len({event.call for event in own}) == 1
    assert len({event.call for event in events}) == 4


def test_a_subscription_ends_where_it_is_cancelled() -> None:
    seen: list[str] = []
    first = subscribe(lambda event: seen.append("first"))
    with subscribe(lambda event: seen.append("second")):
        Call("save", "a").finish()
        first.cancel()
        first.cancel()
        Call("save", "a").finish()
    Call("save", "a").finish()

    assert seen == ["first", "second", "second"]
    assert subscriptions() == ()


def test_only_functions_can_subscribe() -> None:
    with pytest.raises(TypeError, match="a function that takes an event"):
        subscribe("print")  # type: ignore[arg-type]


def test_a_subscriber_that_fails_is_logged_once_and_breaks_nothing(
    events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    class StrangeError(BaseException):
        pass

    def fail(event: Event) -> None:
        raise StrangeError(event.name)

    with subscribe(fail), subscribe(events.append):
        for _ in range(3):
            with Call("save", "runs/a") as call, call.phase("write"):
                pass

    assert len(events) == 12  # two subscribers, before and after the one that fails
    (record,) = caplog.records
    assert "a subscriber failed with the event save.write of runs/a" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is StrangeError


def test_an_error_of_a_subscriber_does_not_hide_the_error_of_the_phase(caplog: pytest.LogCaptureFixture) -> None:
    with subscribe(lambda event: 1 / 0), pytest.raises(OSError, match="disk"), Call("save", "a").phase("write"):
        raise OSError("disk")

    assert len(caplog.records) == 1


def test_ctrl_c_in_a_subscriber_is_not_swallowed() -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    with subscribe(interrupt), pytest.raises(KeyboardInterrupt):
        Call("save", "a").finish()


def test_a_subscriber_that_saves_is_not_called_for_its_own_save() -> None:
    seen: list[str] = []

    def save_again(event: Event) -> None:
        seen.append(event.path)
        Call("save", event.path + "+").finish()

    with subscribe(save_again), subscribe(lambda event: seen.append(f"other {event.path}")):
        Call("save", "a").finish()
        Call("save", "b").finish()

    assert seen == ["a", "other a+", "other a", "b", "other b+", "other b"]


def test_a_part_in_another_process_sends_its_events_home(events: list[Event]) -> None:
    with about(step=3):
        call = Call("save", "a", rank=2, world_size=4)
    away: Call = pickle.loads(pickle.dumps(call))
    sent: list[bytes] = []
    away.send_to(lambda update: sent.append(pickle.dumps(update)))
    with away.phase("write", nbytes=8):
        away.advance(8)
    assert events == []
    assert (call.current_phase, call.done_bytes) == ("", 0)

    for message in sent:
        call.receive(pickle.loads(message))
    assert (call.current_phase, call.done_bytes) == ("write", 8)
    call.finish()

    assert [(event.name, event.call, event.step, event.rank) for event in events] == [
        ("save.write", call.id, 3, 2),
        ("save", call.id, 3, 2),
    ]
    assert events[1].began <= events[0].began <= events[1].began + events[1].seconds


def test_a_sink_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    call = Call("save", "a")
    call.send_to(lambda update: 1 / 0)
    with call, call.phase("write"):
        call.advance(8)

    assert len(caplog.records) == 1


def test_the_seconds_of_a_phase_are_those_of_all_its_parts() -> None:
    call = Call("save", "a")
    for name in ("write", "sync", "write"):
        with call.phase(name) as part:
            assert call.current_phase == name
    assert list(call.seconds) == ["write", "sync"]
    assert call.seconds["write"] > part.seconds


def test_another_attempt_counts_from_the_beginning() -> None:
    call = Call("save", "a")
    for name in ("capture", "write"):
        with call.phase(name):
            call.advance(8)

    call.start_over("capture")

    assert list(call.seconds) == ["capture"]
    assert call.done_bytes == 0


def test_bytes_are_counted_in_any_thread_and_where_a_copy_of_the_call_is() -> None:
    call = Call("save", "a")
    away: Call = pickle.loads(pickle.dumps(call))
    away.send_to(call.receive)
    threads = [threading.Thread(target=lambda: [away.advance(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert away.done_bytes == 4000
    call.receive(Update("write", away.done_bytes))
    assert call.done_bytes == 4000


def test_events_are_not_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**fields: object) -> None:
        raise AssertionError("an event was made for nobody")

    monkeypatch.delenv("HOLDFAST_TRACE", raising=False)
    monkeypatch.setattr("holdfast._watching.calls.Event", refuse)
    with Call("save", "a") as call, call.phase("write"):
        pass

    with subscribe(print), pytest.raises(AssertionError, match="for nobody"):
        Call("save", "a").finish()


def test_watching_needs_neither_torch_nor_opentelemetry() -> None:
    program = (
        "import sys; from holdfast._watching.calls import Call; from holdfast.watching import subscribe\n"
        "with subscribe(print), Call('save', 'a') as call, call.phase('write'): pass\n"
        "print({'torch', 'opentelemetry'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "verb='save', phase='write'" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_of_many_ranks_those_that_took_longest_are_told_of() -> None:
    ranks = [{"plan": 0.1, "write": 1.0} for _ in range(1000)]
    ranks[77] = {"plan": 0.1, "write": 9.0}
    ranks[500] = {"plan": 0.5, "write": 0.1}  # the slowest in one phase, and not busy for long

    told = busiest(ranks)

    assert len(told) == 20
    assert {77, 500} <= set(told)
    assert told == sorted(told)
    assert busiest(ranks[:20]) == list(range(20))
