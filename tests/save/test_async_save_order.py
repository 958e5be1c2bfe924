"""Background saves one after the other: which waits for which, what is known of one on its way, the program's end."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast._background.queues import SaveQueue
from holdfast._watching.calls import Call
from tests.save.overlapping import PATIENCE, GatedStore, held_back
from tests.warm_python import warm_python


def test_saves_to_one_path_are_carried_out_in_the_order_of_the_calls(tmp_path) -> None:
    store = GatedStore(tmp_path / "x")
    pending = [holdfast.async_save({"n": 0}, store, overwrite=True)]
    pending += [holdfast.async_save({"n": n}, tmp_path / "x", overwrite=True, when_busy="copy") for n in (1, 2)]
    ended: list[int] = []
    for number, each in enumerate(pending):
        each.committed.add_done_callback(lambda _, number=number: ended.append(number))
    assert not any(each.done() for each in pending)
    assert [each.progress().phase for each in pending[1:]] == ["waiting"] * 2
    store.gate.set()
    identities = [each.result(PATIENCE).identity for each in pending]
    assert ended == [0, 1, 2]
    assert holdfast.open(tmp_path / "x").read() == {"n": 2}
    assert len(set(identities)) == 3


def test_a_save_waits_for_background_saves_to_the_same_path(tmp_path, monkeypatch) -> None:
    store = GatedStore(tmp_path / "x")
    pending = holdfast.async_save({"n": torch.ones(3)}, store)
    wait_for = SaveQueue.wait_for

    def open_the_gate_and_wait(queue: SaveQueue, claim: Any) -> None:
        assert not pending.done()
        store.gate.set()
        wait_for(queue, claim)

    monkeypatch.setattr(SaveQueue, "wait_for", open_the_gate_and_wait)
    holdfast.save({"n": 2}, tmp_path / "x", overwrite=True)
    assert pending.done()
    assert holdfast.open(tmp_path / "x").read() == {"n": 2}


def test_a_load_waits_for_background_saves_to_the_same_path(tmp_path, monkeypatch) -> None:
    store = GatedStore(tmp_path / "x")
    pending = holdfast.async_save({"w": torch.arange(4.0)}, store)
    loading = threading.Event()
    wait_for = SaveQueue.wait_for
    monkeypatch.setattr(SaveQueue, "wait_for", lambda *given: (loading.set(), wait_for(*given))[1])
    into = {"w": torch.zeros(4)}
    thread = threading.Thread(target=holdfast.load, args=(into, tmp_path / "x"))
    thread.start()
    assert loading.wait(PATIENCE)
    store.gate.set()
    thread.join(PATIENCE)
    pending.result()
    assert into["w"].tolist() == [0, 1, 2, 3]


def load_again(path: str) -> None:
    holdfast.load({"w": torch.zeros(2)}, path)


def save_again(path: str) -> None:
    holdfast.save({"w": torch.ones(2)}, path, overwrite=True)


def save_a_copy(path: str) -> None:
    holdfast.async_save({"w": torch.ones(2)}, f"{path}-copy")


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("act", [load_again, save_again, save_a_copy])
def test_a_callback_does_not_wait_for_the_save_that_calls_it(tmp_path, act: Any, writer: Any) -> None:
    done = []

    def on_event(event: holdfast.Event) -> None:
        if event.is_whole and event.path == str(tmp_path / "x"):
            act(event.path)
            done.append(event.name)

    with holdfast.subscribe(on_event):
        pending = holdfast.async_save({"w": torch.ones(2)}, tmp_path / "x", writer=writer)
        pending.result(PATIENCE)
        holdfast.async_save({"w": torch.ones(2)}, tmp_path / "last").result(PATIENCE)
    assert done == ["save"]
    assert all(holdfast.open(folder).verify().ok for folder in tmp_path.iterdir())
    assert (tmp_path / "x-copy").exists() == (act is save_a_copy)


def test_a_save_elsewhere_does_not_wait(tmp_path) -> None:
    store = GatedStore(tmp_path / "x")
    pending = holdfast.async_save({"n": torch.ones(3)}, store)
    holdfast.save({"n": 2}, tmp_path / "y")
    assert not pending.done()
    store.gate.set()
    pending.result(PATIENCE)


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path) -> None:
    holdfast.save({"n": 1}, tmp_path)
    with pytest.raises(holdfast.errors.CheckpointExistsError):
        holdfast.async_save({"n": 2}, tmp_path).result()
    assert holdfast.open(tmp_path).read() == {"n": 1}


def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with held_back():
        weight = nn.Parameter(torch.ones(3))
        pending = holdfast.async_save({"w": weight}, "x", optimizers=torch.optim.SGD([weight]))
        monkeypatch.chdir(tmp_path / "there")
    pending.result(PATIENCE)
    assert pending.path == str(tmp_path / "here" / "x")
    assert holdfast.open(tmp_path / "here" / "x").read()["w"].tolist() == [1, 1, 1]


# --- progress --------------------------------------------------------------------------------------------------------


class Watched(GatedStore):
    """Notes what is known of the save whenever it does something."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate.set()
        self.pending: list[holdfast.PendingSave] = []
        self.is_known = threading.Event()
        self.seen: list[tuple[str, Any]] = []

    def note(self, what: str) -> None:
        assert self.is_known.wait(PATIENCE)
        self.seen.append((what, self.pending[0].progress()))

    def size(self, name: str) -> int | None:
        self.note("look")
        return super().size(name)

    def list(self) -> Any:
        self.note("look")
        return super().list()

    def create(self, name: str, size: int | None = None, memory: int | None = None) -> Any:
        self.note("create")
        return super().create(name, size, memory)

    def commit(self, name: str, content: bytes, *, replaces: bytes | None) -> None:
        self.note("commit")
        super().commit(name, content, replaces=replaces)


def test_progress_in_every_phase(tmp_path) -> None:
    weight = nn.Parameter(torch.ones(100, 200))
    total = 80_000 + 64
    store = Watched(tmp_path / "x")
    with held_back() as held:
        state = {"w": weight, "small": torch.ones(3)}
        pending = holdfast.async_save(state, store, optimizers=torch.optim.SGD([weight]))
        store.pending.append(pending)
        store.is_known.set()
        assert pending.progress() == ("copying", 0, pending.progress().total_bytes)
        assert 80_000 < pending.progress().total_bytes <= total + 64
        assert not pending.done()
        held.let_go()
    pending.result(PATIENCE)
    whole = pending.progress().total_bytes
    assert pending.progress() == ("committed", whole, whole)
    phases = {what: progress.phase for what, progress in store.seen if what != "look"}
    assert phases["commit"] == "committing"
    first = next(progress for what, progress in store.seen if what == "create")
    assert (first.phase, first.done_bytes) == ("writing", 0)
    assert next(progress.phase for what, progress in store.seen if what == "look") == "planning"
    last = next(progress for what, progress in store.seen if what == "commit")
    assert last.done_bytes == whole


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_writer_tells_how_far_it_is(tmp_path, monkeypatch, writer: Any) -> None:
    told: list[Any] = []
    send, receive = Call._send, Call.receive

    def note(call: Call) -> None:
        told.append((call.current_phase, call.done_bytes))

    # In a thread it is the call itself that counts, and in a process one there, of which this one hears.
    monkeypatch.setattr(Call, "_send", lambda self, event: (note(self), send(self, event)))
    monkeypatch.setattr(Call, "receive", lambda self, update: (receive(self, update), note(self)))
    holdfast.async_save({"w": torch.ones(1000)}, tmp_path / "x", writer=writer).result(PATIENCE)
    names = [name for name, _ in told]
    assert list(dict.fromkeys(names)) == ["capture", "stage", "compare", "plan", "write", "commit"]
    done = [nbytes for name, nbytes in told if name == "write"]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] >= 4000


# --- the end of a program --------------------------------------------------------------------------------------------

PREAMBLE = """
import sys, threading
from pathlib import Path
import torch
import holdfast
from holdfast._stores.local_store import LocalStore

folder = Path(sys.argv[1])

class Slow(LocalStore):
    def create(self, name, size=None, memory=None):
        threading.Event().wait(0.5)  # still running when the script has ended
        return super().create(name, size, memory)

class Failing(Slow):
    def create(self, name, size=None, memory=None):
        raise OSError("the disk is gone")

weight = torch.nn.Parameter(torch.ones(1000, 1000))
optimizer = torch.optim.SGD([weight])
"""

SCRIPTS = {
    "pending": """
holdfast.async_save({"w": weight}, Slow(folder), optimizers=optimizer)
holdfast.async_save({"w": 2 * weight}, folder, overwrite=True, when_busy="copy", writer="process")
sys.exit(3)
""",
    "failed": """
pending = holdfast.async_save({"w": weight}, Failing(folder))
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[Path, int, str]]:
    """All scripts, run at the same time: each needs seconds to begin."""
    running = {}
    for name, script in SCRIPTS.items():
        folder = tmp_path_factory.mktemp("end")
        source = folder / "script.py"
        source.write_text(PREAMBLE + script)
        command = [*warm_python(), str(source), str(folder / "saved")]
        running[name] = folder / "saved", subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    return {
        name: (saved, process.wait(3 * PATIENCE), process.communicate()[1])
        for name, (saved, process) in running.items()
    }


def test_the_end_of_a_program_waits_for_saves(ended: Any) -> None:
    saved, code, told = ended["pending"]
    assert code == 3, told
    assert holdfast.open(saved)["w"][:].eq(2).all()
    assert "holdfast" not in told


def test_the_exit_code_tells_of_a_failure_that_nobody_saw(ended: Any) -> None:
    saved, code, told = ended["failed"]
    assert code == 1
    assert f"the background save to {saved} failed: OSError: the disk is gone" in told
