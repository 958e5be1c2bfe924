"""Trace files, read as Perfetto and Chrome read them."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._watching import trace_file as trace_appending
from holdfast._watching.calls import Call
from holdfast._watching.trace_file import TraceFile
from holdfast.watching import Event, trace_to


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events that are drawn, after checking all that a viewer relies on."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    events: list[dict[str, Any]] = content["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) + sum(event["ph"] == "M" for event in events) == len(events)
    for event in drawn:
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("ts", "dur", "pid", "tid"))
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        assert (event["pid"], event["tid"]) in named
    assert_rows_can_be_drawn(drawn)
    return drawn


def assert_rows_can_be_drawn(drawn: list[dict[str, Any]]) -> None:
    """In one row, two events lie within each other or apart."""
    for row in {(event["pid"], event["tid"]) for event in drawn}:
        ends: list[int] = []
        own = [event for event in drawn if (event["pid"], event["tid"]) == row]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1], (event, own)
            ends.append(end)


def save(path: str = "runs/a", **fields: Any) -> None:
    with Call("save", path, **fields) as call:
        with call.phase("plan"):
            pass
        with call.phase("write", nbytes=1000) as seen:
            seen.detail["loss"] = float("nan")
        call.finish(nbytes=1000, slowest_rank=0)


def test_phases_lie_within_their_call(tmp_path: Path) -> None:
    with trace_to(tmp_path / "new" / "trace.json"):
        save(step=0)
        save(step=1)
    save(step=2)

    drawn = read_trace(tmp_path / "new" / "trace.json")
    assert [event["name"] for event in drawn] == ["save.plan", "save.write", "save"] * 2
    assert [event["args"]["step"] for event in drawn] == [0] * 3 + [1] * 3
    assert drawn[1]["args"]["nbytes"] == 1000
    assert drawn[1]["args"]["loss"] == "nan"
    assert drawn[2]["args"]["slowest_rank"] == 0
    assert {event["tid"] for event in drawn} == {0}
    plan, write, whole = drawn[:3]
    assert whole["ts"] <= plan["ts"] <= write["ts"] <= write["ts"] + write["dur"] <= whole["ts"] + whole["dur"]


def test_it_can_be_read_after_every_phase(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_to(path):
        call = Call("save", "a")
        for count in range(1, 20):
            with call.phase(f"part {count}"):
                pass
            assert len(read_trace(path)) == count


def test_failures_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_to(path), pytest.raises(OSError, match="room"), Call("save", "a").phase("write"):
        raise OSError("no room")

    assert read_trace(path)[0]["args"]["error"] == "OSError: no room"


def test_calls_that_overlap_have_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with trace_to(path):
        one, two = Call("save", "one"), Call("save", "two")
        for call in (one, two, one, two):
            with call.phase("write"):
                pass
        one.finish()
        two.finish()
        save("three")

    rows = {event["args"]["path"]: event["tid"] for event in read_trace(path)}
    assert sorted([rows["one"], rows["two"]]) == [0, 1]
    assert rows["three"] == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_overlaps_can_be_drawn(calls: list[tuple[int, list[int], int]]) -> None:
    told: list[tuple[float, int, Event]] = []
    for number, (began, phases, rest) in enumerate(calls):
        fields: dict[str, Any] = {"verb": "save", "path": "a", "call": str(number), "call_began": float(began)}
        now = float(began)
        for phase in phases:
            event = Event(**fields, phase="write", began=now, seconds=float(phase))
            now += phase
            told.append((now, len(told), event))
        told.append((now + rest, len(told), Event(**fields, began=float(began), seconds=now + rest - began)))
    trace, drawn = TraceFile("trace.json"), []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast._watching.trace_file.append_to_trace", lambda path, events: drawn.extend(events))
        for *_, event in sorted(told, key=lambda entry: entry[:2]):
            trace(event)

    drawn = [event for event in drawn if event["ph"] == "X"]
    assert len(drawn) == len(told)
    assert_rows_can_be_drawn(drawn)
    for number in {event["args"]["call"] for event in drawn}:
        assert len({event["tid"] for event in drawn if event["args"]["call"] == number}) == 1


def test_every_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    with trace_to(tmp_path / "trace.json"):
        save(rank=0, world_size=2)
        save(rank=1, world_size=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank-0.json", "trace.rank-1.json"]
    for rank in range(2):
        assert {event["pid"] for event in read_trace(tmp_path / f"trace.rank-{rank}.json")} == {rank}


def test_the_environment_can_ask_for_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRACE", str(tmp_path / "trace.json"))
    save()
    monkeypatch.delenv("HOLDFAST_TRACE")
    save()

    assert len(read_trace(tmp_path / "trace.json")) == 3


def test_a_trace_that_is_there_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):
        with trace_to(path):
            save()

    assert len(read_trace(path)) == 6


@pytest.mark.parametrize("content", [b"precious", b'{"traceEvents": []}', b"x" * 10_000])
def test_what_is_no_trace_of_ours_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)

    with pytest.raises(ValueError, match="is not a trace of Holdfast"):
        trace_to(path)
    with pytest.raises(ValueError, match="is not a trace of Holdfast"):
        trace_appending.append_to_trace(path, [{}])
    assert path.read_bytes() == content


def test_a_file_that_was_cut_anywhere_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [{"number": number, "text": 'a "line"\n]}\n'} for number in range(3)]
    for event in events:
        trace_appending.append_to_trace(path, [event])
    whole = path.read_bytes()
    ends = [whole.index(json.dumps(event).encode()) + len(json.dumps(event)) for event in events]

    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        trace_appending.append_to_trace(path, [{"number": "next"}])

        complete = [event for event, end in zip(events, ends, strict=True) if end <= cut]
        assert json.loads(path.read_text())["traceEvents"] == [*complete, {"number": "next"}], cut


def test_a_full_disk_leaves_the_trace_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    trace_appending.append_to_trace(path, [{"number": 0}])
    before, write = path.read_bytes(), os.write

    def write_a_little(file: int, content: bytes) -> int:
        if len(content) < 10:
            return write(file, content)
        write(file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_a_little)
    for target in (path, tmp_path / "first.json"):
        with pytest.raises(OSError, match="No space"):
            trace_appending.append_to_trace(target, [{"number": 1, "text": "x" * 100}])
    monkeypatch.undo()

    assert path.read_bytes() == before
    assert (tmp_path / "first.json").read_bytes() == b""


def test_a_trace_that_cannot_be_written_breaks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").mkdir()
    with trace_to(tmp_path / "folder" / "trace.json"):
        (tmp_path / "folder").rmdir()
        save()
        save()

    (record,) = caplog.records
    assert "a subscriber failed" in record.getMessage()


def test_threads_and_processes_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import sys; from holdfast._watching.calls import Call\n"
        "for number in range(40):\n"
        "    with Call('save', 'a') as call, call.phase('write'): pass\n"
    )
    environment = {**os.environ, "HOLDFAST_TRACE": str(path)}
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]

    def save_often() -> None:
        for _ in range(20):
            trace_appending.append_to_trace(path, [{"ph": "i"}])

    threads = [threading.Thread(target=save_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [process.wait(60) for process in processes] == [0, 0]
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 160
    assert sum(event["ph"] == "i" for event in events) == 40


KILLED_IN_A_PHASE = """
import os, signal, sys
from holdfast._watching.calls import Call
from holdfast.watching import trace_to
trace_to(sys.argv[1])
call = Call("save", "a", 1)
with call.phase("plan"):
    pass
with call.phase("write"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_a_phase_leaves_the_phases_before_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_PHASE, str(path)], check=False)

    assert done.returncode == -signal.SIGKILL
    assert [event["name"] for event in read_trace(path)] == ["save.plan"]


KILLED_ANYWHERE = """
import itertools, sys
from holdfast._watching.calls import Call
from holdfast.watching import trace_to
trace_to(sys.argv[1])
print("ready", flush=True)
for step in itertools.count():
    with Call("save", "a", step) as call:
        for phase in ("plan", "write", "commit"):
            with call.phase(phase) as seen:
                seen.detail["padding"] = "x" * (step % 300)
"""


def test_a_kill_while_writing_loses_one_event_at_most_and_the_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", KILLED_ANYWHERE, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            size = path.stat().st_size if path.exists() else 0
            while not path.exists() or path.stat().st_size < size + 20_000:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
        lines = path.read_text().splitlines()

        with trace_to(path):
            save("after")

        # All but the brackets and, if the kill came within the write, one event.
        mended = [line.removesuffix(",") for line in path.read_text().splitlines()]
        survived = sum(line.removesuffix(",") == other for line, other in zip(lines, mended, strict=False))
        assert survived >= len(lines) - 2
        assert [event["args"]["path"] for event in read_trace(path)[-3:]] == ["after"] * 3


def test_the_environment_may_name_a_folder_that_is_not_there_yet(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRACE", str(tmp_path / "new" / "trace.json"))
    holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
    assert json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]


def test_a_trace_that_has_no_place_breaks_no_save(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("HOLDFAST_TRACE", "trace-without-a-place.json")
    holdfast.save({"w": torch.ones(2)}, tmp_path / "x")
    assert caplog.text.count("a subscriber failed") == 1
    assert holdfast.open(tmp_path / "x").verify().ok


def test_a_child_that_is_forked_while_an_event_is_written_does_not_keep_the_lock(tmp_path, monkeypatch) -> None:
    path = tmp_path / "trace.json"
    until_the_end, end = os.pipe()
    children: list[int] = []
    write = trace_appending._write

    def fork_and_write(*given: Any) -> None:
        child = os.fork()
        if child == 0:
            gc.freeze()
            os.close(end)
            os.read(until_the_end, 1)
            os._exit(0)
        children.append(child)
        write(*given)

    with monkeypatch.context() as patched:
        patched.setattr(trace_appending, "_write", fork_and_write)
        trace_appending.append_to_trace(path, [{"name": "save"}])
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if somebody has it
    os.close(end)
    os.close(until_the_end)
    assert [os.waitpid(child, 0)[1] for child in children] == [0]
