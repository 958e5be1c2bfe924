"""The contract of ``holdfast.stores.Store`` as tests, for authors of stores."""

from __future__ import annotations

import itertools
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast._stores.store import BufferedSink, CachedReader, InPlaceSink, Listed, SharedReader, Sink, Store
from holdfast.errors import CommitConflictError, DamagedCheckpointError, UnsafePathError

# What a store may have to be faster, as tests: whoever has such a method keeps to the same contract with it.


_CONTENT = bytes(range(256)) * 20_000 + b"and some more"


class FastMethods:
    """Part of ``StoreConformance``. What a store does not have is skipped."""

    @pytest.mark.parametrize("memory", [None, 1, 300_000])
    def test_buffers_are_filled_and_written(self, store: Store, memory: int | None) -> None:
        with store.create("data", len(_CONTENT), memory) as sink:
            self._write_in_buffers(sink, _CONTENT)
        assert store.read("data") == _CONTENT

    def test_buffers_and_writes_take_turns(self, store: Store) -> None:
        with store.create("data", len(_CONTENT)) as sink:
            for at in range(0, len(_CONTENT), 1_000_000):
                sink.write(_CONTENT[at : at + 10_000])
                self._write_in_buffers(sink, _CONTENT[at + 10_000 : at + 1_000_000])
        assert store.read("data") == _CONTENT

    def test_only_what_is_filled_of_a_buffer_is_written(self, store: Store) -> None:
        with store.create("data", len(_CONTENT)) as sink:
            lender = _able(sink, BufferedSink)
            buffer = lender.buffer()
            assert buffer is not None
            buffer[:10] = b"0123......"
            lender.advance(4)
            self._write_in_buffers(sink, _CONTENT[4:])
        assert store.read("data") == b"0123" + _CONTENT[4:]

    def test_memory_that_stays_as_it_is_is_written_or_not_taken(self, store: Store) -> None:
        pages = mmap.mmap(-1, len(_CONTENT))
        pages[:] = _CONTENT
        with store.create("data", len(_CONTENT)) as sink:
            placing = _able(sink, InPlaceSink)
            for begin, end in itertools.pairwise([0, 4096, 5_000, 1 << 20, 3 << 20, len(_CONTENT)]):
                if not placing.write_in_place(memoryview(pages)[begin:end]):
                    sink.write(_CONTENT[begin:end])
        assert store.read("data") == _CONTENT

    def test_what_is_cached_is_read_or_nothing_is_promised(self, store: Store) -> None:
        store.put("data", _CONTENT)
        with store.reader("data") as reader:
            cached = _able(reader, CachedReader)
            for begin, size in [(0, 10), (77, 3_000_000), (len(_CONTENT) - 1, 1)]:
                memory = bytearray(size)
                assert cached.is_cached(begin, size) in (True, False, None)
                if cached.read_cached(begin, memory):
                    assert memory == _CONTENT[begin : begin + size]

    def test_what_is_shared_is_read_as_everything_is(self, store: Store) -> None:
        store.put("data", _CONTENT)
        memory = bytearray(b"." * 3_000_002)
        with store.reader("data") as reader:
            _able(reader, SharedReader).read_shared(77, memoryview(memory)[1:-1])
        assert memory == b"." + _CONTENT[77:3_000_077] + b"."

    def _write_in_buffers(self, sink: Sink, content: bytes) -> None:
        lender = _able(sink, BufferedSink)
        while content:
            buffer = lender.buffer()
            if buffer is None:
                sink.write(content)
                return
            count = min(len(buffer), len(content))
            buffer[:count] = content[:count]
            lender.advance(count)
            content = content[count:]


def _able(thing: Any, ability: type) -> Any:
    """The sink or reader, if it has an ability; otherwise the test is skipped."""
    if not isinstance(thing, ability):
        pytest.skip(f"{type(thing).__name__} is not a {ability.__name__}")
    return thing


_UNSAFE_NAMES = ["", ".", "..", "../other", "folder/file", "/etc/passwd", "a\\b", "nul\0byte", "\ud800"]
_GOOD_NAMES = [
    "holdfast.json",
    "index-00c0ffee00c0ffee.safetensors",
    "data-00c0ffee00c0ffee-12-3.safetensors",
    "with space",
    "größe-重さ",
    "..dots..",
    ".hidden",
    "100%25",
    "a?b#c&d=e",
]


class StoreConformance(FastMethods, ABC):
    """Every test here says something that Holdfast relies on. A store that passes them all can hold checkpoints.

    Subclass it in a test module, under a name that begins with ``Test``, and say how a store is made. Called with one
    folder, ``make_store`` gives stores of one place, as two processes have; with another folder, of another place.

    What it cannot test: that bytes survive a loss of power, and that all this holds between machines.

    >>> from holdfast._stores.local_store import LocalStore
    >>> class TestLocalStore(StoreConformance):
    ...     def make_store(self, folder):
    ...         return LocalStore(folder / "checkpoint")
    """

    rounds = 20
    """How often to try what goes wrong only sometimes. More takes longer and finds more."""

    @abstractmethod
    def make_store(self, folder: Path) -> Store:
        """A store of a place that belongs to ``folder``: in it, or named after it. Nothing is there at first."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """The store under test."""
        return self.make_store(tmp_path)

    @pytest.fixture
    def same_place(self, tmp_path: Path, store: Store) -> Store:
        """Another store of the same place."""
        return self.make_store(tmp_path)

    @pytest.fixture
    def other_place(self, tmp_path: Path, store: Store) -> Store:
        """A store of another place."""
        folder = tmp_path / "other"
        folder.mkdir()
        return self.make_store(folder)

    # --- writing ------------------------------------------------------------------------------------------------

    def test_an_object_is_read_as_it_was_written(self, store: Store) -> None:
        with store.create("data") as sink:
            sink.write(b"first, ")
            sink.write(b"second")
        assert store.read("data") == b"first, second"

    def test_an_object_may_be_empty(self, store: Store) -> None:
        with store.create("nothing written"):
            pass
        with store.create("nothing in it", 0) as sink:
            sink.write(b"")
        assert [store.read(name) for name in ("nothing written", "nothing in it")] == [b"", b""]
        assert [store.size(name) for name in ("nothing written", "nothing in it")] == [0, 0]

    def test_an_object_may_be_large(self, store: Store) -> None:
        part = bytes(range(256)) * 4096
        with store.create("data", 12 * len(part) + 1) as sink:
            for _ in range(12):
                sink.write(part)
            sink.write(b"x")
        assert store.size("data") == 12 * len(part) + 1
        assert store.read("data") == part * 12 + b"x"

    @pytest.mark.parametrize(
        "content",
        [
            b"01234567",
            bytearray(b"01234567"),
            memoryview(b"..01234567..")[2:10],
            memoryview(b"01234567").cast("B", (2, 4)),
            np.array([[1.5, 2.5]], np.float32),
            np.empty((3, 0), np.float32),
        ],
        ids=["bytes", "bytearray", "slice", "two dimensions", "numpy", "no elements"],
    )
    def test_any_contiguous_memory_can_be_written(self, store: Store, content: Any) -> None:
        with store.create("created") as sink:
            sink.write(content)
        store.put("put", content)
        assert store.read("created") == store.read("put") == memoryview(content).tobytes()

    def test_memory_may_be_used_again_after_it_was_written(self, store: Store) -> None:
        memory = bytearray(b"first")
        with store.create("data") as sink:
            sink.write(memory)
            memory[:] = b"other"
            sink.write(memory)
            memory[:] = b"third"
        assert store.read("data") == b"firstother"

    def test_a_name_that_is_taken_is_refused(self, store: Store, same_place: Store) -> None:
        store.put("data", b"first")
        with pytest.raises(FileExistsError, match="data"):
            same_place.put("data", b"second")
        assert store.read("data") == b"first"

    def test_the_name_of_something_committed_is_taken(self, store: Store) -> None:
        store.commit("record", b"first", replaces=None)
        with pytest.raises(FileExistsError, match="record"):
            store.put("record", b"second")
        assert store.read("record") == b"first"

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
    def test_an_error_while_writing_leaves_nothing(self, store: Store, error: type[BaseException]) -> None:
        def fail() -> None:
            with store.create("data") as sink:
                sink.write(b"half of")
                raise error("in the middle")

        with pytest.raises(error, match="in the middle"):
            fail()
        assert store.size("data") is None
        assert store.list() == []
        store.put("data", b"whole")
        assert store.read("data") == b"whole"

    @pytest.mark.parametrize("announced", [0, 4, 6])
    def test_a_size_that_was_announced_has_to_be_kept(self, store: Store, announced: int) -> None:
        with pytest.raises(ValueError, match="data"), store.create("data", announced) as sink:
            sink.write(b"12345")
        assert store.list() == []

    def test_a_sink_that_outlives_its_block_changes_nothing(self, store: Store) -> None:
        with store.create("data") as sink:
            sink.write(b"whole")
        with suppress(Exception):  # any refusal will do
            sink.write(b"more")
        assert store.read("data") == b"whole"

    def test_many_objects_are_written_at_once(self, store: Store, same_place: Store) -> None:
        def write(number: int) -> None:
            with (store, same_place)[number % 2].create(f"data-{number}") as sink:
                for _ in range(10):
                    sink.write(bytes([number]) * 1000)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(write, range(40)))
        assert {(found.name, found.size) for found in store.list()} == {(f"data-{n}", 10_000) for n in range(40)}
        assert all(store.read(f"data-{number}") == bytes([number]) * 10_000 for number in range(40))

    # --- reading ------------------------------------------------------------------------------------------------

    def test_any_part_is_read(self, store: Store) -> None:
        content = bytes(range(10))
        store.put("data", content)
        for begin in range(11):
            assert store.read("data", begin) == content[begin:]
            for end in range(begin, 11):
                assert store.read("data", begin, end) == content[begin:end]

    def test_a_buffer_is_filled_and_nothing_around_it(self, store: Store) -> None:
        store.put("data", b"0123456789")
        memory = bytearray(b"........")
        store.read_into("data", 3, memoryview(memory)[2:6])
        assert memory == b"..3456.."

    def test_buffers_of_any_type_are_filled(self, store: Store) -> None:
        numbers = np.array([1.5, -2.5, 3.5])
        store.put("data", b"header" + numbers.tobytes())
        filled = np.zeros(2)
        store.read_into("data", 6 + 8, filled)
        assert filled.tolist() == [-2.5, 3.5]
        grid = memoryview(bytearray(6)).cast("B", (2, 3))
        with store.reader("data") as reader:
            reader.read_into(0, grid)
            reader.read_into(6, np.empty((0, 2)))
        assert grid.tobytes() == b"header"

    def test_a_reader_knows_the_size(self, store: Store) -> None:
        store.put("data", b"12345")
        with store.reader("data") as reader:
            assert reader.size == 5

    @pytest.mark.parametrize(("begin", "length"), [(0, 11), (10, 1), (4, 7), (11, 0), (2**40, 1), (2**70, 1)])
    def test_reading_past_the_end_says_what_was_expected_and_what_is_there(
        self, store: Store, begin: int, length: int
    ) -> None:
        store.put("data", b"0123456789")
        memory = bytearray(b"." * length)
        with pytest.raises(DamagedCheckpointError, match="data") as raised:
            store.read_into("data", begin, memory)
        assert (raised.value.expected, raised.value.found) == (begin + length, 10)
        assert raised.value.file.endswith("data")
        with pytest.raises(DamagedCheckpointError, match="data") as raised:
            store.read("data", begin, begin + length)
        assert (raised.value.expected, raised.value.found) == (begin + length, 10)

    def test_an_absurd_length_is_refused_before_memory_is_taken_for_it(self, store: Store) -> None:
        store.put("data", b"0123456789")
        with pytest.raises(DamagedCheckpointError):
            store.read("data", 0, 2**62)
        with pytest.raises(DamagedCheckpointError):
            store.read("data", 11)

    def test_positions_are_not_counted_from_the_end(self, store: Store) -> None:
        store.put("data", b"0123456789")
        with pytest.raises(ValueError, match="data"):
            store.read_into("data", -1, bytearray(1))
        for begin, end in [(-1, None), (-2, -1), (0, -1), (5, 4)]:
            with pytest.raises(ValueError, match="data"):
                store.read("data", begin, end)

    def test_a_missing_object_is_a_missing_file(self, store: Store) -> None:
        def open_it() -> None:
            with store.reader("data"):
                pass

        attempts: list[Callable[[], Any]] = [
            lambda: store.read("data"),
            lambda: store.read_into("data", 0, bytearray(1)),
            open_it,
        ]
        for put_another in (False, True):
            if put_another:
                store.put("other", b"something")
            for attempt in attempts:
                with pytest.raises(FileNotFoundError, match="data"):
                    attempt()

    def test_threads_share_a_reader(self, store: Store) -> None:
        content = bytes(number % 251 for number in range(100_000))
        store.put("data", content)

        def read_some(number: int) -> bool:
            begin = number * 487 % 90_000
            memory = bytearray(1 + number * 31 % 10_000)
            reader.read_into(begin, memory)
            return memory == content[begin : begin + len(memory)]

        with store.reader("data") as reader, ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read_some, range(400)))

    @pytest.mark.parametrize("change", ["replace", "delete"])
    def test_an_open_reader_never_gives_bytes_of_another_object(self, store: Store, change: str) -> None:
        store.commit("record", b"old content", replaces=None)
        with store.reader("record") as reader:
            if change == "replace":
                store.commit("record", b"new content", replaces=b"old content")
            else:
                store.delete(["record"])
                store.put("record", b"new content")
            memory = bytearray(11)
            try:
                reader.read_into(0, memory)
            except (OSError, DamagedCheckpointError):
                return
        assert memory == b"old content"

    # --- names --------------------------------------------------------------------------------------------------

    def test_there_is_nothing_at_first(self, store: Store) -> None:
        assert store.list() == []
        assert store.size("data") is None
        store.delete(["data"])
        store.sync()
        assert store.list() == []

    def test_all_objects_are_listed_with_their_sizes(self, store: Store) -> None:
        store.put("data", b"12345")
        store.put("empty", b"")
        store.commit("record", b"123", replaces=None)
        listed = sorted(store.list(), key=lambda found: found.name)
        assert listed == [Listed("data", 5), Listed("empty", 0), Listed("record", 3)]
        assert [store.size(name) for name in ("data", "empty", "record", "missing")] == [5, 0, 3, None]

    def test_deleted_objects_are_gone_and_others_are_not(self, store: Store, same_place: Store) -> None:
        for name in ("a", "b", "c"):
            store.put(name, b"x")
        store.delete(name for name in ["a", "missing", "c"])
        assert [found.name for found in same_place.list()] == ["b"]
        assert same_place.size("a") is None
        store.put("a", b"again")
        assert same_place.read("a") == b"again"

    @pytest.mark.parametrize("name", _GOOD_NAMES)
    def test_names_are_kept_as_they_are(self, store: Store, name: str) -> None:
        store.put(name, b"content")
        assert store.list() == [Listed(name, 7)]
        assert store.read(name) == b"content"
        store.commit(name, b"other", replaces=b"content")
        assert store.list() == [Listed(name, 5)]
        store.delete([name])
        assert store.list() == []

    def test_names_differ_by_case_or_are_refused(self, store: Store) -> None:
        store.put("data", b"lower")
        try:
            store.put("Data", b"upper")
        except FileExistsError:
            return
        assert (store.read("data"), store.read("Data")) == (b"lower", b"upper")

    @pytest.mark.parametrize("name", _UNSAFE_NAMES, ids=ascii)
    def test_names_that_lead_elsewhere_are_refused(self, store: Store, name: str) -> None:
        store.put("data", b"content")
        attempts: list[Callable[[], Any]] = [
            lambda: store.put(name, b"x"),
            lambda: store.read(name),
            lambda: store.read_into(name, 0, bytearray(1)),
            lambda: store.size(name),
            lambda: store.delete(["data", name]),
            lambda: store.commit(name, b"x", replaces=None),
        ]
        for attempt in attempts:
            with pytest.raises(UnsafePathError) as raised:
                attempt()
            assert raised.value.name == name
        assert store.list() == [Listed("data", 7)]

    def test_stores_of_one_place_see_the_same(self, store: Store, same_place: Store) -> None:
        store.put("data", b"content")
        store.commit("record", b"first", replaces=None)
        same_place.commit("record", b"second", replaces=b"first")
        assert (same_place.read("data"), store.read("record")) == (b"content", b"second")
        assert sorted(found.name for found in same_place.list()) == ["data", "record"]

    def test_stores_of_two_places_have_nothing_in_common(self, store: Store, other_place: Store) -> None:
        store.put("data", b"content")
        other_place.put("data", b"other")
        other_place.delete(["data"])
        assert store.read("data") == b"content"
        assert other_place.list() == []

    def test_names_stay_after_sync(self, store: Store, same_place: Store) -> None:
        store.put("data", b"content")
        store.sync()
        same_place.sync()
        assert same_place.read("data") == b"content"

    def test_the_location_is_in_messages(self, store: Store) -> None:
        assert store.location
        assert store.location in repr(store)
        with pytest.raises(FileNotFoundError) as raised:
            store.read("data")
        assert store.location in str(raised.value)

    # --- commits ------------------------------------------------------------------------------------------------

    def test_a_commit_makes_an_object_and_nothing_else(self, store: Store, same_place: Store) -> None:
        store.commit("record", b"content", replaces=None)
        assert same_place.read("record") == b"content"
        assert same_place.list() == [Listed("record", 7)]

    @pytest.mark.parametrize("new", [b"", b"short", b"much longer than before" * 1000])
    def test_a_commit_replaces_all_of_what_was_there(self, store: Store, same_place: Store, new: bytes) -> None:
        store.put("data", b"untouched")
        store.commit("record", b"the old content", replaces=None)
        same_place.commit("record", new, replaces=b"the old content")
        assert store.read("record") == new
        assert sorted(found.name for found in store.list()) == ["data", "record"]

    @pytest.mark.parametrize(
        ("there", "replaces"),
        [
            (b"theirs", None),
            (None, b"mine"),
            (b"theirs", b"mine"),
            (b"mine and more", b"mine"),
            (b"min", b"mine"),
            (b"", None),
            (None, b""),
        ],
    )
    def test_a_commit_changes_nothing_if_it_finds_something_else(
        self, store: Store, there: bytes | None, replaces: bytes | None
    ) -> None:
        if there is not None:
            store.commit("record", there, replaces=None)
        before = store.list()
        with pytest.raises(CommitConflictError, match="record") as raised:
            store.commit("record", b"new", replaces=replaces)
        assert raised.value.path.endswith("record")
        assert store.list() == before
        assert there is None or store.read("record") == there

    def test_a_deleted_record_can_be_committed_again(self, store: Store) -> None:
        store.commit("record", b"first", replaces=None)
        store.delete(["record"])
        store.commit("record", b"second", replaces=None)
        assert store.read("record") == b"second"

    @pytest.mark.parametrize("old", [None, b"old"])
    def test_of_those_who_commit_at_once_one_succeeds(self, tmp_path: Path, store: Store, old: bytes | None) -> None:
        competitors = 6
        stores = [self.make_store(tmp_path) for _ in range(competitors)]
        for number in range(self.rounds):
            record = f"record-{number}"
            if old is not None:
                store.commit(record, old, replaces=None)
            start = threading.Barrier(competitors)

            def compete(
                who: int, record: str = record, start: threading.Barrier = start, old: bytes | None = old
            ) -> bool:
                start.wait()
                try:
                    stores[who].commit(record, b"from %d" % who, replaces=old)
                except CommitConflictError:
                    return False
                return True

            with ThreadPoolExecutor(competitors) as threads:
                succeeded = list(threads.map(compete, range(competitors)))
            assert sum(succeeded) == 1
            assert store.read(record) == b"from %d" % succeeded.index(True)
        assert len(store.list()) == self.rounds

    def test_readers_see_one_content_or_the_other_while_it_is_replaced(self, store: Store, same_place: Store) -> None:
        contents = [bytes([number]) * (1 + number * 7919 % 50_000) for number in range(self.rounds + 1)]
        store.commit("record", contents[0], replaces=None)
        finished = threading.Event()

        def read_all_the_time() -> set[bytes]:
            seen = {same_place.read("record")}
            while not finished.is_set():
                seen.add(same_place.read("record"))
            return seen

        with ThreadPoolExecutor(2) as threads:
            readers = [threads.submit(read_all_the_time) for _ in range(2)]
            try:
                for old, new in itertools.pairwise(contents):
                    store.commit("record", new, replaces=old)
            finally:
                finished.set()
            seen = {content for reader in readers for content in reader.result()}
        assert seen <= set(contents)
        assert store.read("record") == contents[-1]
