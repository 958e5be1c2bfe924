"""How two chunks of one tensor overlap."""

from holdfast._base.boxes import overlap
from holdfast._formats.dcp.metadata import ChunkStorageMetadata

__all__: list[str] = []


def _check_shard_metadata_pair_overlap(shard1: ChunkStorageMetadata, shard2: ChunkStorageMetadata) -> bool:
    """Whether two chunks share an element."""
    return overlap(shard1.offsets, shard1.sizes, shard2.offsets, shard2.sizes) is not None


def _shards_get_overlap_region_wrt_saved_tensor(
    saved_shard: ChunkStorageMetadata, current_shard: ChunkStorageMetadata
) -> list[tuple[int, int, int, int]]:
    """Per dimension: ``(dim, start in the saved chunk, start in the current chunk, length)`` of the shared region."""
    shared = overlap(saved_shard.offsets, saved_shard.sizes, current_shard.offsets, current_shard.sizes)
    if shared is None:
        return [(dim, 0, 0, 0) for dim in range(len(saved_shard.offsets))]
    start, lengths = shared
    return [
        (dim, begin - saved_shard.offsets[dim], begin - current_shard.offsets[dim], length)
        for dim, (begin, length) in enumerate(zip(start, lengths, strict=True))
    ]
