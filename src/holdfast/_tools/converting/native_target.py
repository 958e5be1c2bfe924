"""Writes checkpoints of our own format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._base.commits import Commit
from holdfast._base.provenance import noted_optimizers, stamp
from holdfast._formats.native.layout import ChunkToWrite, FileLayout
from holdfast._formats.native.names import RECORD, new_generation
from holdfast._formats.native.record import Record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.stored_parts import WHOLE, PartsByRule
from holdfast._formats.native.values import Encoder
from holdfast._formats.native.values import Path as TreePath
from holdfast._formats.native.writing import (
    Bytes,
    CheckpointContents,
    ChunkBytes,
    commit_checkpoint,
    inspect_destination,
    remove_unfinished,
    write_chunks,
)
from holdfast._formats.source import Source
from holdfast._stores.local_store import LocalStore
from holdfast._stores.store import Store
from holdfast._tools.converting.outgoing import Outgoing, bytes_of_next
from holdfast._tools.converting.target import Target, Written
from holdfast.errors import UnsupportedTensorError, UnsupportedValueError


class NativeTarget(Target):
    """A folder of our own format, or any store."""

    format = "native"
    keeps_per_rank = True
    keeps_ties = True
    arrays_are_tensors = True

    def refuse(self, outgoing: Outgoing) -> None:
        """Raise for values that have no stored form."""
        self._tree(outgoing)

    def write(self, outgoing: Outgoing, place: Path) -> Written:
        """Write a new folder."""
        return self.write_to(LocalStore(place), outgoing, overwrite=False)

    def write_to(
        self,
        store: Store,
        outgoing: Outgoing,
        *,
        overwrite: bool,
        prove: Callable[[Source], None] | None = None,
    ) -> Written:
        """Write to a store, and commit. If it raises, what is in the store is as it was, unless it is the commit itself
        of which nobody knows whether it has happened: then the files stay.

        ``prove`` gets the checkpoint to read before it is committed, and raises if something is wrong with it.
        """
        existing = inspect_destination(store, overwrite=overwrite)
        generation = new_generation()
        refs = [
            TensorRef(tensor.key, tensor.dtype, tensor.shape, tensor.kind, tensor.numpy, tensor.rank)
            for tensor in outgoing.tensors.values()
        ]
        noted = {"format": outgoing.source.format, "identity": outgoing.source.identity}
        contents = CheckpointContents(
            tensors=refs,
            tree=self._tree(outgoing),
            metadata=dict(outgoing.source.metadata),
            written={**stamp(1), "converted_from": noted, **noted_optimizers([outgoing.optimizers])},
            parts=[PartsByRule(WHOLE)] * len(refs),
        )
        commit = Commit()

        def proof(record: Record) -> None:
            if prove is not None:
                prove(NativeSource(store, allow_pickle=outgoing.allow_pickle, record=record))

        @contextmanager
        def open_chunks(layout: FileLayout) -> Iterator[ChunkBytes]:
            with closing(outgoing.stream(chunk.key for chunk, _ in layout.chunks)) as stream:
                # The next ones of the stream, which has the chunks in the same order.
                yield ChunkBytes(lambda chunk: map(_as_array, bytes_of_next(stream, chunk.nbytes)))

        files = write_chunks(
            store, _chunks(refs), open_chunks, generation=generation, memory_budget=outgoing.memory_budget, writers=1
        )
        try:
            record = commit_checkpoint(store, existing, files, contents, generation, commit=commit, prove=proof)
        except BaseException:
            if not commit.may_have_happened:
                remove_unfinished(store, [file.name for file in files])
            raise
        names = [*record.file_names(), RECORD]
        return Written(names, sum(store.size(name) or 0 for name in names))

    def _tree(self, outgoing: Outgoing) -> Any:
        """The state as typed values."""
        # What a checkpoint of ours holds as a pickle that nobody loaded goes back as it came.
        may_pickle = outgoing.allow_pickle or outgoing.source.format == self.format
        try:
            return Encoder(_key_of, allow_pickle=may_pickle).encode(outgoing.tree)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(
                f"{error.message}\nExclude these keys, or pass only_tensors=True (--only-tensors) to leave out all "
                "values.",
                key=error.key,
                keys=error.keys,
            ) from None


def _key_of(path: TreePath, tensor: Any) -> str:
    if isinstance(tensor, TensorRef):
        return tensor.key
    key = ".".join(map(str, path))
    raise UnsupportedTensorError(
        f"'{key}' is a tensor with the layout {tensor.layout} and elements of {tensor.dtype}, which has no stored form "
        "but torch's own. Exclude it, or convert it to a plain tensor first.",
        key=key,
        kind=str(tensor.layout),
    )


def _chunks(refs: list[TensorRef]) -> list[ChunkToWrite]:
    """Every tensor that has elements, as one chunk."""
    return [
        ChunkToWrite(number, ref.key, ref.dtype, ref.shape, (0,) * len(ref.shape), ref.shape)
        for number, ref in enumerate(refs)
        if ref.nbytes
    ]


def _as_array(data: memoryview) -> Bytes:
    return np.frombuffer(data, np.uint8)
