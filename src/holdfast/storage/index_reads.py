"""The indexes in the folder of a DCP checkpoint: one of all ranks, or one of each rank's own part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from holdfast.errors import CheckpointNotFoundError
from holdfast.formats.dcp.index import decode_index
from holdfast.metadata import Metadata, StorageMeta
from holdfast.storage import layout
from holdfast.storage.rank_local import merge_rank_metadata, shared_save_id
from holdfast.stores.filesystem import AnyPath, FileSystemBase


@dataclass(frozen=True)
class IndexReads:
    """Reads the indexes of one folder, for one load."""

    fs: FileSystemBase
    path: AnyPath
    path_of: Callable[[int | None], AnyPath]
    """Of the index of a rank, or of the whole checkpoint."""
    load_id: str
    allow_pickle: bool

    def read(self, rank: int | None = None) -> Metadata:
        """The index of the whole checkpoint, or that of one rank's own part."""
        if rank:
            name = self._committed_without_name(rank)
            if name is not None:
                return self._read_index(self.fs.concat_path(self.path, name))
        return self._read_index(self.path_of(rank))

    def read_merged(self, rank: int) -> Metadata:
        """One index out of the indexes of all ranks, for a checkpoint that was saved rank by rank."""
        parts = {}
        for name in self._names():
            for other in (layout.rank_of_index(name), layout.rank_of_temporary_index(name)):
                if other is not None and other not in parts:
                    with suppress(CheckpointNotFoundError):  # it only has an index of a save that was not committed
                        parts[other] = self.read(other)
        if not parts:
            raise CheckpointNotFoundError(self._what_is_here_instead(layout.METADATA_NAME), path=str(self.path))
        return merge_rank_metadata(parts, rank)

    def _read_index(self, file: AnyPath) -> Metadata:
        try:
            with self.fs.create_stream(file, "rb") as stream:
                data: bytes = stream.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(
                self._what_is_here_instead(PurePath(file).name), path=str(self.path)
            ) from error
        metadata = decode_index(data, source=str(file), allow_pickle=self.allow_pickle)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _committed_without_name(self, rank: int) -> str | None:
        """A rank's index of the save that rank 0 has committed, if the save was killed before it got its name."""
        waiting = [name for name in self._names() if layout.rank_of_temporary_index(name) == rank]
        if not waiting:
            return None
        try:
            committed = shared_save_id(self._read_index(self.path_of(0)))
        except CheckpointNotFoundError:
            return None
        name = layout.temporary_name(layout.metadata_name(rank), committed or "")
        return name if name in waiting else None

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [PurePath(path).name for path in self.fs.ls(self.path)]
        return []

    def _what_is_here_instead(self, wanted: str) -> str:
        here = f"no checkpoint at {self.path}: "
        if not self.fs.exists(self.path):
            return here + "the path does not exist. Check it for a typo, and that all ranks see the same disk."
        try:
            names = sorted(PurePath(path).name for path in self.fs.ls(self.path))
        except NotADirectoryError:
            return here + "it is not a folder."
        data = [name for name in names if layout.is_data_file(name)]
        if data:
            return here + f"it has {len(data)} data file(s) but no {wanted}, so the save was not finished."
        inner = [
            name for name in names if self.fs.exists(self.fs.concat_path(self.path, f"{name}/{layout.METADATA_NAME}"))
        ]
        if inner:
            return here + f"but there are checkpoints inside of it: {', '.join(inner[-5:])}. Give one of those paths."
        return here + f"there is no {wanted} in it ({len(names)} other file(s))."
