"""Which tensor goes into which file of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.sizes import parse_size

_LARGEST_HEADER = 90_000_000
"""Readers refuse headers beyond 100 MB."""


def shard_size(wish: int | str | None) -> int | None:
    """The most bytes of a file, given as a number or as people write it; None for no limit.

    >>> shard_size("5GB"), shard_size("1.5 GiB"), shard_size(1 << 20)
    (5000000000, 1610612736, 1048576)
    """
    try:
        return None if wish is None else parse_size(wish)
    except ValueError as error:
        raise ValueError(f"max_shard_size: {error}") from None


def fill_shards(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """Keys for every file, in their order. A tensor that is larger than a file may be has one for itself.

    >>> fill_shards({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    room, room_in_header = largest, _LARGEST_HEADER
    for key, size in sizes.items():
        entry = 7 * len(key) + 400
        is_full = (room is not None and size > room) or entry > room_in_header
        if shards[-1] and is_full:
            shards.append([])
            room, room_in_header = largest, _LARGEST_HEADER
        shards[-1].append(key)
        room = None if room is None else room - size
        room_in_header -= entry
    return shards


def shard_names(count: int) -> list[str]:
    """The names of so many files.

    >>> shard_names(1), shard_names(2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
