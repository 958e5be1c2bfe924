"""Checkpoints that were saved rank by rank: each rank has an index of its own part, nobody has one of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import RankDisagreementError
from holdfast.metadata import Metadata, TensorStorageMetadata


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
