"""Checkpoints as several ranks write them, made by hand: any tensors, cut in any way."""

from __future__ import annotations

import os
import signal
import traceback
from contextlib import nullcontext
from itertools import pairwise

import numpy as np

from holdfast._formats.native.dtypes import dtype_named
from holdfast._formats.native.layout import ChunkToWrite
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.stored_parts import parts_of_shares
from holdfast._formats.native.writing import CheckpointContents, ChunkBytes, Existing, commit_checkpoint, write_chunks
from holdfast._tools.repairing.unrecorded import tree_of_keys

GENERATION = "00112233aabbccdd"


def elements(number, dtype, shape):
    """The bytes of a tensor, by which it is known."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype_named(dtype).itemsize
    return np.random.default_rng(number).integers(0, 2, nbytes, np.uint8).tobytes()


def write(store, tensors, cuts, *, max_file_size=None, generation=GENERATION):
    """Write and commit tensors, given as key to dtype and shape.

    ``cuts`` has for every key its chunks, as rank, offsets and sizes.
    """
    refs = [TensorRef(key, dtype_named(dtype), tuple(shape)) for key, (dtype, shape) in tensors.items()]
    arrays = {
        ref.key: np.frombuffer(elements(number, ref.dtype.name, ref.shape), ref.dtype.carrier).reshape(ref.shape)
        for number, ref in enumerate(refs)
    }
    by_rank = {}
    for number, ref in enumerate(refs):
        for rank, offsets, sizes in cuts[ref.key]:
            chunk = ChunkToWrite(number, ref.key, ref.dtype, ref.shape, tuple(offsets), tuple(sizes))
            by_rank.setdefault(rank, []).append(chunk)

    def pieces(chunk):
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return [np.frombuffer(np.ascontiguousarray(arrays[chunk.key][box]).tobytes(), np.uint8)]

    files = []
    for rank, chunks in sorted(by_rank.items()):
        files += write_chunks(
            store,
            chunks,
            lambda layout: nullcontext(ChunkBytes(pieces)),
            generation=generation,
            rank=rank,
            max_file_size=max_file_size,
            writers=len(by_rank),
        )
    tree = tree_of_keys([ref.key for ref in refs])
    parts = parts_of_shares(refs, by_rank)
    contents = CheckpointContents(refs, tree, {"note": 1}, {}, parts, max(by_rank) + 1)
    commit_checkpoint(store, Existing(None, frozenset()), files, contents, generation)
    return refs, arrays


def grid(shape, edges, ranks):
    """The boxes of a grid whose lines are at these edges, dealt out to ranks in turn."""
    boxes = [((), ())]
    for size, cuts in zip(shape, edges, strict=True):
        lines = sorted({0, size, *cuts})
        spans = list(pairwise(lines))
        boxes = [((*at, low), (*sizes, high - low)) for at, sizes in boxes for low, high in spans]
    return [(number % ranks, at, sizes) for number, (at, sizes) in enumerate(boxes)]


def age_all(folder):
    """Let everything in a folder look as if nobody had touched it for years."""
    for file in folder.rglob("*"):
        os.utime(file, (1_000_000, 1_000_000))


def in_a_process_that_is_killed(body):
    """Run a function in a process of its own, which must get killed by it."""
    assert ended_by(body) == signal.SIGKILL


def ended_by(body):
    """The signal that ended a process in which a function ran; 0 if the function came to its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def spoil_tables(store, names=None):
    """Let the tables of data files, all by default, be of no use."""
    for listed in list(store.list()):
        if listed.name.startswith("data-") and (names is None or listed.name in names):
            content = bytearray(store.read(listed.name))
            content[-20] ^= 1
            store.delete([listed.name])
            store.put(listed.name, bytes(content))
