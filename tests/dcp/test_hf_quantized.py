"""Quantized models come out as the numbers that are meant, whatever slice of them is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast.dcp as dcp
from holdfast._dcp import quantized_reader
from holdfast._dcp import quantized_reader as quantized_weights
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.dcp.metadata import MetadataIndex
from holdfast.dcp.planner import LoadItemType, LoadPlan, ReadItem
from holdfast.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from holdfast.errors import CheckpointException, DamagedCheckpointError
from tests.dcp.states import Layouts, same_parts
from tests.properties import examples
from tests.rank_pool import RankPool
from tests.torches import ALONE

FLOATS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MODEL = "model-00001-of-00001.safetensors"


def block_scaled(
    shape: tuple[int, ...], block: int = 128, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What is stored, and what it means."""
    torch.manual_seed(seed)
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    blocks = [1] * (len(shape) - 2) + [block] * min(2, len(shape))
    scales = torch.rand([-(-size // step) for size, step in zip(shape, blocks, strict=True)]) + 0.5
    plain = weight.float().clone()
    for cell in torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, len(shape)).tolist():
        place = tuple(cell)
        plain[place] *= scales[tuple(at // step for at, step in zip(place, blocks, strict=True))]
    return {"x.weight": weight, "x.weight_scale_inv": scales}, plain


def mxfp4(
    leading: tuple[int, ...], groups: int, per_group: int, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same, two 4-bit floats in a byte, the low half first."""
    torch.manual_seed(seed)
    stored = torch.randint(0, 256, (*leading, groups, per_group), dtype=torch.uint8)
    scales = torch.randint(100, 150, (*leading, groups), dtype=torch.uint8)
    values = []
    for row, exponent in zip(stored.view(-1, per_group).tolist(), scales.flatten().tolist(), strict=True):
        for byte in row:
            for half in (byte & 15, byte >> 4):
                sign = -1 if half & 8 else 1
                values.append(sign * FLOATS[half & 7] * 2.0 ** (exponent - 127))
    plain = torch.tensor(values).view(*leading, groups * per_group * 2)
    return {"e_blocks": stored, "e_scales": scales}, plain


def write(path: Path, tensors: dict[str, torch.Tensor], index: bool = True) -> None:
    save_file(tensors, path / MODEL, {"format": "pt"})
    if index:
        content = {"metadata": {}, "weight_map": dict.fromkeys(tensors, MODEL)}
        (path / "model.safetensors.index.json").write_text(json.dumps(content))


def load(state: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(path, **options), no_dist=True)


class Slices(dcp.DefaultLoadPlanner):
    """Loads one slice of a key into a tensor of that size."""

    def __init__(self, key: str, offsets: list[int], target: torch.Tensor) -> None:
        super().__init__()
        self.key, self.offsets, self.target = key, torch.Size(offsets), target

    def create_local_plan(self) -> LoadPlan:
        chunk = self.metadata.state_dict_metadata[self.key].chunks[0]
        index = MetadataIndex(self.key, chunk.offsets)
        zeros = torch.Size([0] * len(self.offsets))
        return LoadPlan([ReadItem(LoadItemType.TENSOR, index, zeros, index, self.offsets, self.target.size())])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target


def slice_of(path: Path, key: str, offsets: list[int], sizes: list[int], **options: Any) -> torch.Tensor:
    target = torch.full(sizes, -7.0)
    reader = QuantizedHuggingFaceStorageReader(path, **options)
    dcp.load({}, storage_reader=reader, planner=Slices(key, offsets, target), no_dist=True)
    return target


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    return offsets, [draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)]


FEW = settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    block=st.integers(1, 5),
    part=st.integers(1, 50),
)
def test_any_slice_of_a_block_scaled_weight_is_right(
    data: st.DataObject, shape: tuple[int, ...], block: int, part: int, tmp_path: Path
) -> None:
    stored, plain = block_scaled(shape, block)
    write(tmp_path, stored)
    offsets, sizes = data.draw(slices(shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_reader, "QUANTIZED_ELEMENTS", part)
        found = slice_of(tmp_path, "x.weight", offsets, sizes, block_size=block)

    assert torch.equal(found, plain[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))])


@FEW
@given(
    data=st.data(),
    leading=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    groups=st.integers(1, 4),
    per_group=st.integers(1, 4),
    part=st.integers(1, 50),
)
def test_any_slice_of_four_bit_floats_is_right(
    data: st.DataObject, leading: tuple[int, ...], groups: int, per_group: int, part: int, tmp_path: Path
) -> None:
    stored, plain = mxfp4(leading, groups, per_group)
    write(tmp_path, stored)
    offsets, sizes = data.draw(slices(tuple(plain.shape)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_reader, "QUANTIZED_ELEMENTS", part)
        found = slice_of(tmp_path, "e_blocks", offsets, sizes)

    assert torch.equal(found, plain[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_model_is_what_stock_torch_makes_of_it(threads: int, tmp_path: Path) -> None:
    weights, plain = block_scaled((130, 140))
    blocks, floats = mxfp4((2, 3), 2, 16)
    other = {"norm.weight": torch.randn(5), "embedding": torch.arange(4)}
    write(tmp_path, weights | blocks | other)

    def blank() -> dict[str, torch.Tensor]:
        return {
            "x.weight": torch.zeros(130, 140), "e_blocks": torch.zeros(2, 3, 64), "norm.weight": torch.zeros(5),
            "embedding": torch.zeros(4, dtype=torch.int64), "x.weight_scale_inv": torch.zeros(2, 2),
        }  # fmt: skip

    ours, theirs = blank(), blank()
    load(ours, tmp_path, thread_count=threads)
    stock.load(theirs, storage_reader=stock.QuantizedHuggingFaceStorageReader(str(tmp_path)), **ALONE)

    assert torch.equal(ours["x.weight"], plain)
    assert torch.equal(ours["e_blocks"], floats)
    # Of every row of 4-bit floats, stock torch fills only as many as there are blocks.
    assert torch.equal(ours["e_blocks"][..., :2], theirs.pop("e_blocks")[..., :2])
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_weights_come_out_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    weights, plain = block_scaled((5, 6), block=2)
    write(tmp_path, weights, index=False)
    state = {"x.weight": torch.zeros(5, 6, dtype=torch.bfloat16)}

    load(state, tmp_path, target_dtype=torch.bfloat16, block_size=2)

    assert torch.equal(state["x.weight"], plain.bfloat16())
    reader = QuantizedHuggingFaceStorageReader(tmp_path, target_dtype=torch.bfloat16, block_size=2)
    assert reader.read_metadata().state_dict_metadata["x.weight"].properties.dtype == torch.bfloat16


def test_powers_at_both_ends_are_exact(tmp_path: Path) -> None:
    blocks = torch.tensor([[[0x21]], [[0x21]]], dtype=torch.uint8)
    write(tmp_path, {"e_blocks": blocks, "e_scales": torch.tensor([[0], [254]], dtype=torch.uint8)})
    state = {"e_blocks": torch.zeros(2, 2)}

    load(state, tmp_path)

    assert state["e_blocks"].tolist() == [[0.5 * 2.0**-127, 2.0**-127], [0.5 * 2.0**127, 2.0**127]]


def test_scales_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, plain = block_scaled((6, 6), block=2)
    write(tmp_path, weights)
    reads: list[str] = []
    original = quantized_reader.read_region

    def counting(*args: Any, key: str, **kwargs: Any) -> None:
        reads.append(key)
        original(*args, key=key, **kwargs)

    for module in (quantized_reader, quantized_weights):
        monkeypatch.setattr(module, "read_region", counting)
    reader = QuantizedHuggingFaceStorageReader(tmp_path, block_size=2)
    targets = [torch.zeros(1, 6) for _ in range(6)]

    class Rows(Slices):
        def create_local_plan(self) -> LoadPlan:
            items = []
            for row in range(6):
                self.offsets, self.target = torch.Size([row, 0]), targets[row]
                (item,) = super().create_local_plan().items
                items.append(item)
            return LoadPlan(items)

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return targets[read_item.storage_offsets[0]]

    dcp.load({}, storage_reader=reader, planner=Rows("x.weight", [0, 0], targets[0]), no_dist=True)

    assert torch.equal(torch.cat(targets), plain)
    assert reads.count("x.weight_scale_inv") == 1
    assert reads.count("x.weight") == 6


def test_a_reader_that_is_reset_forgets_the_scales(tmp_path: Path) -> None:
    state = {"x.weight": torch.zeros(4, 4)}
    reader = QuantizedHuggingFaceStorageReader(tmp_path, block_size=2)
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        weights, plain = block_scaled((4, 4), block=2, seed=seed)
        write(folder, weights)
        dcp.load(state, checkpoint_id=folder, storage_reader=reader, no_dist=True)
        assert torch.equal(state["x.weight"], plain)


@pytest.mark.parametrize(("stored", "missing"), [
    ({"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "x.weight_scale_inv"),
    ({"e_blocks": torch.ones(2, 2, dtype=torch.uint8)}, "e_scales"),
])  # fmt: skip
def test_missing_scales_are_named_before_anything_is_changed(
    stored: dict[str, torch.Tensor], missing: str, tmp_path: Path
) -> None:
    write(tmp_path, stored | {"other": torch.ones(2)})
    (key,) = stored
    state = {key: torch.zeros(stored[key].shape, dtype=stored[key].dtype), "other": torch.zeros(2)}

    with pytest.raises(CheckpointException, match=f"'{key}' needs '{missing}'"):
        load(state, tmp_path)

    assert state["other"].tolist() == [0, 0]
    other = {"other": torch.zeros(2)}
    load(other, tmp_path)
    assert other["other"].tolist() == [1, 1], "what is not quantized loads all the same"


@pytest.mark.parametrize("stored", [
    {"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 2)},
    {"e_blocks": torch.ones(2, 2, dtype=torch.uint8), "e_scales": torch.ones(3, dtype=torch.uint8)},
])  # fmt: skip
def test_scales_that_do_not_fit_are_refused(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path, stored)
    key = next(iter(stored))

    with pytest.raises(DamagedCheckpointError, match=f"'{key}'.*expected.*found") as refused:
        QuantizedHuggingFaceStorageReader(tmp_path).read_metadata()
    assert refused.value.key == key


def test_blocks_that_were_torn_apart_are_refused(tmp_path: Path) -> None:
    told = {"e_scales": [0, 0], "e_blocks": [0, 0, 0]}
    for number, blocks in enumerate(torch.ones(1, 2, 4, dtype=torch.uint8).chunk(2, dim=2)):
        tensors = {"e_blocks": blocks.contiguous()}
        if number == 0:
            tensors["e_scales"] = torch.ones(1, 2, dtype=torch.uint8)
        sharding = {key: {"saved_offsets": told[key]} for key in tensors}
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        save_file(tensors, tmp_path / name, {"DCP_SHARDING_INFO": json.dumps(sharding)})
        told["e_blocks"] = [0, 0, 2]

    with pytest.raises(DamagedCheckpointError, match=r"'e_blocks'.*blocks in one piece"):
        QuantizedHuggingFaceStorageReader(tmp_path).read_metadata()


def test_a_block_has_at_least_one_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size"):
        QuantizedHuggingFaceStorageReader(tmp_path, block_size=0)


# --- ranks -----------------------------------------------------------------------------------------------------------


def stored_model() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    weights, plain = block_scaled((20, 14), block=4)
    blocks, floats = mxfp4((6,), 3, 2)
    return weights | blocks, {"x.weight": plain, "e_blocks": floats}


def save_in_parts(path: Path) -> None:
    layouts = Layouts()
    stored, _ = stored_model()
    # Rows of bytes: torch cannot distribute tensors of 8-bit floats.
    state = {key: layouts.lay_out("rows", tensor) for key, tensor in stored.items() if key != "x.weight"}
    state["x.weight"] = stored["x.weight"]
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def load_sharded(path: Path, layout: str) -> list[str]:
    layouts = Layouts()
    _, plain = stored_model()
    state = {key: layouts.lay_out(layout, torch.zeros_like(tensor)) for key, tensor in plain.items()}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(path, block_size=4))
    return [key for key in plain if not same_parts(state[key], layouts.lay_out(layout, plain[key]))]


@pytest.mark.parametrize("layout", ["rows", "columns", "blocks"])
def test_ranks_load_slices_that_are_not_aligned_to_blocks(layout: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_in_parts, tmp_path)

    assert ranks(3).run(load_sharded, tmp_path, layout) == [[]] * 3


def test_an_ordinary_reader_gives_the_stored_numbers(tmp_path: Path) -> None:
    stored, _ = mxfp4((2,), 2, 2)
    write(tmp_path, stored)
    state = {"e_blocks": torch.zeros(2, 2, 2, dtype=torch.uint8)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["e_blocks"], stored["e_blocks"])
