"""Blocks that a region is cut into for its way between ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast._dcp import deliveries
from holdfast._formats.tensor_places import narrowed


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300))
def test_blocks_tile_the_region_in_order_and_are_small(lengths: tuple[int, ...], itemsize: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliveries, "DELIVERY_BYTES", most)
        boxes = list(deliveries.blocks(lengths, itemsize))

    numbered = torch.arange(prod(lengths)).reshape(lengths)
    pieces = [narrowed(numbered, *box).flatten() for box in boxes]
    assert torch.cat(pieces).tolist() == numbered.flatten().tolist()
    assert all(piece.numel() <= max(1, most // itemsize) for piece in pieces)
    assert all(tuple(narrowed(numbered, *box).shape) == box[1] for box in boxes)


def test_a_small_region_is_one_block() -> None:
    assert list(deliveries.blocks((3, 4), 4)) == [((0, 0), (3, 4))]
    assert list(deliveries.blocks((), 4)) == [((), ())]
