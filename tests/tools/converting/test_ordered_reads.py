"""Parts of a tensor that several threads read, one after the other."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._formats.archives.zip_writer import ZipWriter
from holdfast._formats.torch_file.source import TorchFileSource
from holdfast._tools.converting.outgoing import OrderedReads
from holdfast.errors import DamagedCheckpointError


class Numbers:
    """A stream of the bytes 0, 1, 2 and so on."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.finished = self.closed = 0
        self._fails_at = fails_at

    def fill(self, begin: int, memory: memoryview, /) -> None:
        self.asked.append(begin)
        if begin == self._fails_at:
            raise OSError("unreadable")
        memory[:] = bytes((begin + at) % 256 for at in range(len(memory)))

    def finish(self) -> None:
        self.finished += 1

    @contextmanager
    def opened(self) -> Iterator[Numbers]:
        yield self
        self.closed += 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_parts_are_read_in_order_whatever_thread_comes_first(lengths: list[int]) -> None:
    stream, total = Numbers(), sum(lengths)
    reads = OrderedReads(stream.opened(), total)
    memory = memoryview(bytearray(total))
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    jobs = [(begin, memory[begin : begin + length]) for begin, length in zip(begins, lengths, strict=True)]

    with ThreadPoolExecutor(len(jobs)) as pool:  # the last part is asked for first
        for job in [pool.submit(reads.fill, *job) for job in reversed(jobs)]:
            job.result(timeout=30)

    assert stream.asked == begins
    assert bytes(memory) == bytes(number % 256 for number in range(total))
    assert (stream.finished, stream.closed) == (1, 1)


def test_nobody_waits_for_a_part_that_was_not_read() -> None:
    stream = Numbers(fails_at=4)
    reads = OrderedReads(stream.opened(), 12)
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(reads.fill, 8, memoryview(bytearray(4)))
        reads.fill(0, memoryview(bytearray(4)))
        with pytest.raises(OSError, match="unreadable"):
            reads.fill(4, memoryview(bytearray(4)))
        with pytest.raises(RuntimeError, match="earlier part"):
            later.result(timeout=30)
    assert stream.finished == 0


def test_those_who_wait_are_sent_away_by_a_stop() -> None:
    reads = OrderedReads(Numbers().opened(), 8)
    begun = threading.Event()

    def read() -> None:
        begun.set()
        reads.fill(4, memoryview(bytearray(4)))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read)
        begun.wait(30)
        reads.stop()
        with pytest.raises(RuntimeError, match="earlier part"):
            waiting.result(timeout=30)


def streamed(source: TorchFileSource, key: str, step: int) -> bytes:
    ref = source.tensors[key]
    memory = np.zeros(ref.nbytes, np.uint8)
    with source.stream(key, memory=1 << 20) as stream:
        for begin in range(0, ref.nbytes, step):
            stream.fill(begin, memory[begin : begin + step].data)
        stream.finish()
    return memory.tobytes()


@given(
    st.sampled_from(["whole", "turned", "part", "stepped", "repeated", "conjugate"]),
    st.integers(1, 30).map(lambda number: 16 * number),
)
def test_any_tensor_of_a_torch_file_comes_as_a_stream(
    tmp_path_factory: pytest.TempPathFactory, key: str, step: int
) -> None:
    numbers = torch.arange(60, dtype=torch.int64)
    state = {
        "whole": numbers.view(6, 10),
        "turned": torch.arange(60.0).view(6, 10).t(),
        "part": numbers[7:29],
        "stepped": numbers.view(6, 10)[:, ::3],
        "repeated": torch.arange(5).expand(4, 5),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }
    path = tmp_path_factory.mktemp("streams") / "all.pt"
    torch.save(state, path)
    assert streamed(TorchFileSource(path), key, step) == state[key].resolve_conj().contiguous().numpy().tobytes()


@pytest.mark.parametrize("key", ["whole", "turned"])
def test_damage_of_a_torch_file_is_found_by_a_stream(tmp_path: Path, key: str) -> None:
    whole = torch.arange(1000.0).view(20, 50)
    torch.save({key: whole if key == "whole" else whole.t()}, tmp_path / "all.pt")
    content = (tmp_path / "all.pt").read_bytes()
    at = content.index(np.float32(777).tobytes())
    (tmp_path / "all.pt").write_bytes(content[:at] + b"\0\0\0\1" + content[at + 4 :])
    with pytest.raises(DamagedCheckpointError, match="CRC"):
        streamed(TorchFileSource(tmp_path / "all.pt"), key, 400)


def test_an_entry_of_another_size_than_was_stated_is_an_error() -> None:
    archive = ZipWriter(io.BytesIO())
    with pytest.raises(ValueError, match="3 bytes came for data/0, which was to have 4"):
        archive.add_from("data/0", 4, [memoryview(b"ab"), memoryview(b"c")])
