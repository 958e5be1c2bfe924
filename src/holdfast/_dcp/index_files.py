"""The indexes in the folder of a DCP checkpoint: one of all ranks, or one of each rank's own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath

from holdfast._formats.dcp import names as layout
from holdfast._formats.dcp.index import decode_index
from holdfast._formats.dcp.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    _StorageInfo,
)
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast.errors import CheckpointNotFoundError, HoldfastError, RankDisagreementError

# Checkpoints that were saved rank by rank: each rank has an index of its own part, nobody has one of the whole.


def merge_rank_metadata(parts: Mapping[int, Metadata], own_rank: int) -> Metadata:
    """One index out of the ranks' indexes. Where several ranks stored the same item, this rank's own comes first."""
    parts = _of_one_save(parts)
    order = sorted(parts, key=lambda rank: (rank != own_rank, rank))
    merged = Metadata({}, planner_data={}, storage_data={}, version=parts[order[0]].version)
    merged.storage_meta = parts[order[0]].storage_meta
    for rank in order:
        _add(merged, parts[rank])
    return merged


def shared_save_id(part: Metadata) -> str | None:
    """The id that a part has in common with those of other ranks; None if its writer gave each rank another one."""
    infos: Iterable[object] = (part.storage_data or {}).values()
    is_ours = any(getattr(info, "seal", None) is not None for info in infos)
    return part.storage_meta.save_id if is_ours and part.storage_meta else None


def _add(merged: Metadata, part: Metadata) -> None:
    for index, info in part.storage_data.items():
        merged.storage_data.setdefault(index, info)
    for key, path in (part.planner_data or {}).items():
        merged.planner_data.setdefault(key, path)
    for key, entry in part.state_dict_metadata.items():
        known = merged.state_dict_metadata.get(key)
        if known is None:
            if isinstance(entry, TensorStorageMetadata):
                entry = TensorStorageMetadata(entry.properties, entry.size, list(entry.chunks))
            merged.state_dict_metadata[key] = entry
        elif isinstance(known, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
            if known.size != entry.size:
                continue  # every rank has a tensor of its own under this key: the first one's it is
            present = {chunk.offsets for chunk in known.chunks}
            known.chunks.extend(chunk for chunk in entry.chunks if chunk.offsets not in present)


def _of_one_save(parts: Mapping[int, Metadata]) -> Mapping[int, Metadata]:
    """The parts of the save that rank 0's part is of. Others are left over from a larger number of ranks."""
    ids = {rank: shared_save_id(part) for rank, part in parts.items()}
    if ids.get(0) is not None:
        return {rank: part for rank, part in parts.items() if ids[rank] in (None, ids[0])}
    known = {rank: save_id for rank, save_id in ids.items() if save_id is not None}
    if len(set(known.values())) > 1:
        views = {rank: f"save {save_id}" for rank, save_id in known.items()}
        raise RankDisagreementError(
            f"the ranks' parts of this checkpoint come from different saves: {views}. Copy the missing index of rank 0 "
            "back, or load another checkpoint.",
            views=views,
        )
    return parts


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

    def read_bytes(self) -> bytes:
        """The index of the whole checkpoint as it is stored."""
        return self._bytes_of(self.path_of(None))

    def decode(self, data: bytes) -> Metadata:
        """The index of the whole checkpoint behind its bytes."""
        return self._decode(data, self.path_of(None))

    def _read_index(self, file: AnyPath) -> Metadata:
        return self._decode(self._bytes_of(file), file)

    def _bytes_of(self, file: AnyPath) -> bytes:
        try:
            with self.fs.create_stream(file, "rb") as stream:
                data: bytes = stream.read()
                return data
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointNotFoundError(
                self._what_is_here_instead(PurePath(file).name), path=str(self.path)
            ) from error

    def _decode(self, data: bytes, file: AnyPath) -> Metadata:
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


@dataclass(frozen=True)
class PlacesInIndex:
    """Where the items of a checkpoint are, for a rank that has not written its index: the index says so."""

    fs: FileSystemBase
    file: AnyPath
    save_id: str | None

    def made(self) -> dict[MetadataIndex, _StorageInfo]:
        """Read the index, which must still be the one of that save."""
        with self.fs.create_stream(self.file, "rb") as stream:
            metadata = decode_index(stream.read(), source=str(self.file))
        found = metadata.storage_meta.save_id if metadata.storage_meta else None
        if found != self.save_id:
            raise HoldfastError(
                f"{self.file} is the index of save {found} by now, not that of save {self.save_id}. Where the items of "
                "that one were is known as long as it is there; look at storage_data before another save replaces it."
            )
        places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        return places
