"""Checkpoints that were saved rank by rank: each rank has an index of its own part, nobody has one of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import RankDisagreementError
from holdfast.metadata import Metadata, TensorStorageMetadata


def merge_rank_metadata(parts: Mapping[int, Metadata], own_rank: int) -> Metadata:
    """One index out of the ranks' indexes. Where several ranks stored the same item, this rank's own comes first."""
    _refuse_different_saves(parts)
    order = sorted(parts, key=lambda rank: (rank != own_rank, rank))
    merged = Metadata({}, planner_data={}, storage_data={}, version=parts[order[0]].version)
    merged.storage_meta = parts[order[0]].storage_meta
    for rank in order:
        _add(merged, parts[rank])
    return merged


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
            present = {chunk.offsets for chunk in known.chunks}
            known.chunks.extend(chunk for chunk in entry.chunks if chunk.offsets not in present)


def _refuse_different_saves(parts: Mapping[int, Metadata]) -> None:
    """Ranks of one save share its id, if we wrote it; other writers give every rank another id."""
    ids = {rank: part.storage_meta.save_id for rank, part in parts.items() if part.storage_meta and _is_ours(part)}
    if len(set(ids.values())) > 1:
        views = {rank: f"save {save_id}" for rank, save_id in ids.items()}
        raise RankDisagreementError(
            f"the ranks' parts of this checkpoint come from different saves: {views}. A save was interrupted between "
            "ranks; load another checkpoint.",
            views=views,
        )


def _is_ours(part: Metadata) -> bool:
    infos: Iterable[object] = (part.storage_data or {}).values()
    return any(getattr(info, "seal", None) is not None for info in infos)
