"""What a store may have to be faster, as tests: whoever has such a method keeps to the same contract with it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.stores.store import Store

_CONTENT = bytes(range(256)) * 20_000 + b"and some more"


class FastMethods:
    """Part of ``StoreConformance``. What a store does not have is skipped."""

    @pytest.mark.parametrize("memory", [None, 1, 300_000])
    def test_rooms_are_filled_and_written(self, store: Store, memory: int | None) -> None:
        with store.create("data", len(_CONTENT)) as sink:
            self._write_in_rooms(sink, _CONTENT, memory)
        assert store.read("data") == _CONTENT

    def test_rooms_and_writes_take_turns(self, store: Store) -> None:
        with store.create("data", len(_CONTENT)) as sink:
            for at in range(0, len(_CONTENT), 1_000_000):
                sink.write(_CONTENT[at : at + 10_000])
                self._write_in_rooms(sink, _CONTENT[at + 10_000 : at + 1_000_000], None)
        assert store.read("data") == _CONTENT

    def test_only_what_is_filled_of_a_room_is_written(self, store: Store) -> None:
        with store.create("data", len(_CONTENT)) as sink:
            room = self._method(sink, "room")(None)
            room[:10] = b"0123......"
            self._method(sink, "advance")(4)
            self._write_in_rooms(sink, _CONTENT[4:], None)
        assert store.read("data") == b"0123" + _CONTENT[4:]

    def test_what_is_cached_is_read_or_nothing_is_promised(self, store: Store) -> None:
        store.put("data", _CONTENT)
        with store.reader("data") as reader:
            read_cached = self._method(reader, "read_cached")
            for begin, size in [(0, 10), (77, 3_000_000), (len(_CONTENT) - 1, 1)]:
                memory = bytearray(size)
                if read_cached(begin, memory):
                    assert memory == _CONTENT[begin : begin + size]

    def test_what_is_shared_is_read_as_everything_is(self, store: Store) -> None:
        store.put("data", _CONTENT)
        memory = bytearray(b"." * 3_000_002)
        with store.reader("data") as reader:
            self._method(reader, "read_shared")(77, memoryview(memory)[1:-1])
        assert memory == b"." + _CONTENT[77:3_000_077] + b"."

    def _method(self, thing: Any, name: str) -> Any:
        found = getattr(thing, name, None)
        if found is None:
            pytest.skip(f"this store has no {name}")
        return found

    def _write_in_rooms(self, sink: Any, content: bytes, memory: int | None) -> None:
        while content:
            room = self._method(sink, "room")(memory)
            if room is None:
                sink.write(content)
                return
            count = min(len(room), len(content))
            room[:count] = content[:count]
            sink.advance(count)
            content = content[count:]
