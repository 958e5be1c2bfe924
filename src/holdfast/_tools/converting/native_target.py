"""Writes checkpoints of our own format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._base.commits import Commit
from holdfast._base.environment import noted_optimizers, stamp
from holdfast._base.tuning import SHARE_OF_ROOMS
from holdfast._formats.native.layout import ChunkToWrite, FileLayout, lay_out
from holdfast._formats.native.names import RECORD, data_file, new_generation
from holdfast._formats.native.record import BLOCK_BYTES, Record
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.source import NativeSource
from holdfast._formats.native.values import Encoder
from holdfast._formats.native.values import Path as TreePath
from holdfast._formats.native.writing import Bytes, write_data_file
from holdfast._formats.source import Source
from holdfast._save.files import Contents, WrittenFile, commit_checkpoint, look_before, remove_unfinished
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
        before = look_before(store, overwrite=overwrite)
        generation = new_generation()
        refs = [
            TensorRef(tensor.key, tensor.dtype, tensor.shape, tensor.kind, tensor.numpy, tensor.rank)
            for tensor in outgoing.tensors.values()
        ]
        noted = {"format": outgoing.source.format, "identity": outgoing.source.identity}
        contents = Contents(
            tensors=refs,
            tree=self._tree(outgoing),
            metadata=dict(outgoing.source.metadata),
            written={**stamp(1), "converted_from": noted, **noted_optimizers([outgoing.optimizers])},
        )
        files: list[WrittenFile] = []
        commit = Commit()

        def proof(record: Record) -> None:
            if prove is not None:
                prove(NativeSource(store, allow_pickle=outgoing.allow_pickle, record=record))

        try:
            for layout in lay_out(_chunks(refs), generation):
                files.append(_write_file(store, data_file(generation, 0, len(files)), layout, outgoing))
            store.sync()
            record = commit_checkpoint(store, before, files, contents, generation, commit=commit, prove=proof)
        except BaseException:
            if not commit.may_have_happened:
                remove_unfinished(store, [file.name for file in files])
            raise
        names = [*(file.name for file in record.files), record.index.name, RECORD]
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


def _write_file(store: Store, name: str, layout: FileLayout, outgoing: Outgoing) -> WrittenFile:
    stream = outgoing.stream(chunk.key for chunk, _ in layout.chunks)

    def pieces(chunk: ChunkToWrite) -> Iterator[Bytes]:
        """The next ones of the stream, which has the chunks in the same order."""
        for data in bytes_of_next(stream, chunk.nbytes):
            yield np.frombuffer(data, np.uint8)

    try:
        with store.create(name, layout.nbytes) as sink:
            digests = write_data_file(sink, layout, pieces, BLOCK_BYTES, outgoing.budget // SHARE_OF_ROOMS)
    finally:
        stream.close()
    rows = [(chunk.tensor, position, chunk.offsets, chunk.sizes) for chunk, position in layout.chunks]
    return WrittenFile(name, layout.nbytes, rows, digests)
