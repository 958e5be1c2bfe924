"""Whatever is done to a store, in whatever order, it holds what a dict would hold."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.store import Store
from holdfast.errors import CommitConflictError, DamagedCheckpointError
from tests.properties import examples

NAMES = st.sampled_from(["record", "data-1", "data-2", ".hidden"])
CONTENTS = st.binary(max_size=40)


class StoreMachine(RuleBasedStateMachine):
    """Two stores of one place, used in turn."""

    stores: list[Store]

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, bytes] = {}

    @rule(
        who=st.booleans(), name=NAMES, parts=st.lists(CONTENTS, max_size=3), fail=st.booleans(), announce=st.booleans()
    )
    def create(self, who: bool, name: str, parts: list[bytes], fail: bool, announce: bool) -> None:
        try:
            with self.stores[who].create(name, sum(map(len, parts)) if announce else None) as sink:
                for part in parts:
                    sink.write(part)
                if fail:
                    raise RuntimeError("on purpose")
        except RuntimeError:
            assert fail
        except FileExistsError:
            assert name in self.expected
        else:
            assert name not in self.expected
            self.expected[name] = b"".join(parts)

    @rule(who=st.booleans(), name=NAMES, content=CONTENTS, guess=st.none() | CONTENTS, right=st.booleans())
    def commit(self, who: bool, name: str, content: bytes, guess: bytes | None, right: bool) -> None:
        replaces = self.expected.get(name) if right else guess
        try:
            self.stores[who].commit(name, content, replaces=replaces)
        except CommitConflictError:
            assert replaces != self.expected.get(name)
        else:
            assert replaces == self.expected.get(name)
            self.expected[name] = content

    @rule(who=st.booleans(), names=st.lists(NAMES, max_size=3))
    def delete(self, who: bool, names: list[str]) -> None:
        self.stores[who].delete(names)
        for name in names:
            self.expected.pop(name, None)

    @rule(who=st.booleans(), name=NAMES, begin=st.integers(0, 50), length=st.integers(0, 50))
    def read(self, who: bool, name: str, begin: int, length: int) -> None:
        memory = bytearray(length)
        try:
            self.stores[who].read_into(name, begin, memory)
            part = self.stores[who].read(name, begin, begin + length)
        except FileNotFoundError:
            assert name not in self.expected
        except DamagedCheckpointError:
            assert begin + length > len(self.expected[name])
        else:
            assert part == memory == self.expected[name][begin : begin + length]
            assert len(part) == length

    @rule(who=st.booleans())
    def sync(self, who: bool) -> None:
        self.stores[who].sync()

    @invariant()
    def everything_is_there(self) -> None:
        for store in self.stores:
            assert {found.name: found.size for found in store.list()} == {
                name: len(content) for name, content in self.expected.items()
            }
            for name, content in self.expected.items():
                assert store.read(name) == content
                assert store.size(name) == len(content)


class LocalMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-"))
        self.stores = [LocalStore(self.folder / "step"), LocalStore(self.folder / "step")]

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


class MemoryMachine(StoreMachine):
    def __init__(self) -> None:
        super().__init__()
        name = uuid.uuid4().hex
        self.stores = [MemoryStore(name), MemoryStore(name)]

    def teardown(self) -> None:
        self.stores[0].delete(list(self.expected))


@pytest.mark.hypothesis
def test_a_local_store_holds_what_a_dict_would_hold() -> None:
    run(LocalMachine)


@pytest.mark.hypothesis
def test_a_memory_store_holds_what_a_dict_would_hold() -> None:
    run(MemoryMachine)


def run(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=25))
