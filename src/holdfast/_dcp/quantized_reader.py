"""Reads Hugging Face folders of quantized models, and gives out the numbers that the stored ones stand for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch

from holdfast._base.box_bytes import readable_parts
from holdfast._base.boxes import Box
from holdfast._base.tuning import QUANTIZED_ELEMENTS
from holdfast._dcp.destinations import resolve_target
from holdfast._dcp.hf_files import _HFStorageInfo
from holdfast._dcp.hf_reader import HuggingFaceStorageReader
from holdfast._dcp.planner import LoadPlanner
from holdfast._formats.dcp.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from holdfast._formats.dcp.plan import LoadPlan, ReadItem
from holdfast._formats.hf_folder.names import opened_as_described
from holdfast._formats.safetensors.torch_dtypes import FLOAT8
from holdfast._formats.tensor_places import fill, narrowed, read_region
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import DamagedCheckpointError

# The arithmetics of quantized weights: how a part of one is read and brought to the numbers that it stands for.


_POSITIVE_FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_FOUR_BIT_FLOATS = torch.cat([_POSITIVE_FLOATS, -_POSITIVE_FLOATS])
_EXPONENT_BIAS = 127


class QuantizedWeight(Protocol):
    """A weight that is stored as small numbers, with scales under a key of their own."""

    @property
    def scales(self) -> str:
        """The key of the scales."""

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape that a chunk of this stored shape is loaded as."""

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """A part of a chunk, as numbers. ``at`` is where it begins in the whole weight, which ``scales`` are of."""


@dataclass(frozen=True)
class BlockScaled:
    """A weight with a factor for every block."""

    scales: str
    block: Sequence[int]
    """The size of a block in every dimension."""

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """As stored."""
        return tuple(stored)

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """Every element times the factor of its block."""
        stored = torch.empty(part.sizes, dtype=info.dtype)
        read_region(stream, info.position, info.shape, info.dtype, part, stored, source=info.relative_path, key=key)
        factors = scales.float()
        for dim, (start, length, block) in enumerate(zip(at, part.sizes, self.block, strict=True)):
            factors = factors.index_select(dim, torch.arange(start, start + length) // block)
        return stored.float() * factors


@dataclass(frozen=True)
class Mxfp4:
    """A weight of 4-bit floats, two to a byte, with an exponent for every block of ``per_block`` of them."""

    scales: str
    per_block: int

    def loaded_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The numbers of all blocks of a row, side by side."""
        return (*stored[:-2], stored[-2] * self.per_block)

    def read(
        self, stream: Any, info: _HFStorageInfo, part: Box, at: Sequence[int], scales: torch.Tensor, key: str
    ) -> torch.Tensor:
        """Whole blocks are read, and what was not asked for is cut off."""
        first = part.offsets[-1] // self.per_block
        count = -(-(part.offsets[-1] + part.sizes[-1]) // self.per_block) - first
        region = Box((*part.offsets[:-1], first, 0), (*part.sizes[:-1], count, info.shape[-1]))
        stored = torch.empty(region.sizes, dtype=torch.uint8)
        read_region(stream, info.position, info.shape, torch.uint8, region, stored, source=info.relative_path, key=key)
        pairs = torch.stack([stored & 0xF, stored >> 4], dim=-1)
        values = _FOUR_BIT_FLOATS[pairs.int()].flatten(-2)
        first_of_whole = at[-1] // self.per_block
        powers = narrowed(scales, (*at[:-1], first_of_whole), (*part.sizes[:-1], count)).double() - _EXPONENT_BIAS
        # In double precision, where no power of two that a byte can hold is too large or too small.
        values = (values * torch.exp2(powers).unsqueeze(-1)).flatten(-2)
        return values.narrow(-1, part.offsets[-1] - first * self.per_block, part.sizes[-1])


# Two kinds are known. Block-scaled: ``X.weight`` goes with ``X.weight_scale_inv``, a number for every block of 128 x
# 128 elements, which is multiplied with them. MXFP4: ``X_blocks`` holds two 4-bit floats per byte, and ``X_scales``
# an exponent for every block of them.


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads quantized weights as ``target_dtype``, and everything else as it is.

    ``X_blocks`` of shape ``[..., G, B]`` is loaded as a tensor of shape ``[..., G * B * 2]`` under that name.

    Args:
        path: the folder.
        thread_count: how many files are read at a time.
        target_dtype: the dtype that quantized weights come out as.
        block_size: rows and columns of a block of block-scaled weights.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp.hf_storage import HuggingFaceStorageWriter
        >>> from holdfast.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
        >>> path = tempfile.mkdtemp()
        >>> weight, scales = torch.ones(2, 2).to(torch.float8_e4m3fn), torch.full((1, 1), 3.0)
        >>> stored = {"up.weight": weight, "up.weight_scale_inv": scales}
        >>> _ = dcp.save(stored, storage_writer=HuggingFaceStorageWriter(path), no_dist=True)
        >>> state = {"up.weight": torch.zeros(2, 2)}
        >>> dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(path), no_dist=True)
        >>> state["up.weight"]
        tensor([[3., 3.],
                [3., 3.]])
    """

    def __init__(
        self,
        path: AnyPath,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        super().__init__(path, thread_count)
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least one row and one column")
        self.target_dtype = target_dtype
        self.block_size = block_size
        self._quantized: dict[str, QuantizedWeight] = {}
        self._unpaired: dict[str, str] = {}
        self._described: dict[str, Any] = {}
        self._scales: dict[str, torch.Tensor] = {}
        self._scales_lock = threading.Lock()

    def read_metadata(self) -> Metadata:
        """The tensors of the folder, as what they are loaded."""
        metadata = super().read_metadata()
        self._described = dict(metadata.state_dict_metadata)
        self._quantized, self._unpaired, self._scales = {}, {}, {}
        for key, entry in self._described.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            if key.endswith(".weight"):
                self._pair_block_scaled(key, entry, metadata)
            elif key.endswith("_blocks") and entry.properties.dtype == torch.uint8 and len(entry.size) > 1:
                self._pair_mxfp4(key, entry, metadata)
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse quantized weights whose scales are not there, before anything is changed."""
        wanted = {item.storage_index.fqn for item in plan.items}
        missing = {key: scales for key, scales in sorted(self._unpaired.items()) if key in wanted}
        if missing:
            shown = ", ".join(f"'{key}' needs '{scales}'" for key, scales in list(missing.items())[:10])
            raise DamagedCheckpointError(
                f"{self.path}: the scales of {len(missing)} quantized weight(s) are not in the folder: {shown}. Bring "
                "the files with the scales, or load the stored numbers as they are with HuggingFaceStorageReader.",
                file=str(self.path),
                key=next(iter(missing)),
                expected=list(missing.values()),
                found=None,
            )
        return super().prepare_local_plan(plan)

    def _pair_block_scaled(self, key: str, entry: TensorStorageMetadata, metadata: Metadata) -> None:
        scales = f"{key}_scale_inv"
        if scales not in self._described:
            if entry.properties.dtype in FLOAT8:
                self._unpaired[key] = scales
            return
        # Blocks are of matrices, of which there may be many.
        block = [1] * (len(entry.size) - 2) + [self.block_size] * min(len(entry.size), 2)
        self._check_scales(key, scales, [-(-size // length) for size, length in zip(entry.size, block, strict=True)])
        self._quantized[key] = BlockScaled(scales, block)
        properties = replace(entry.properties, dtype=self.target_dtype)
        metadata.state_dict_metadata[key] = replace(entry, properties=properties)

    def _pair_mxfp4(self, key: str, entry: TensorStorageMetadata, metadata: Metadata) -> None:
        scales = f"{key.removesuffix('_blocks')}_scales"
        if scales not in self._described:
            self._unpaired[key] = scales
            return
        self._check_scales(key, scales, entry.size[:-1])
        weight = self._quantized[key] = Mxfp4(scales, per_block=entry.size[-1] * 2)
        chunks = []
        for chunk in entry.chunks:
            if chunk.sizes[-1] != entry.size[-1]:
                self._refuse(key, "blocks in one piece", list(chunk.sizes))
            info = metadata.storage_data.pop(MetadataIndex(key, chunk.offsets))
            offsets = torch.Size(weight.loaded_shape(chunk.offsets))
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(weight.loaded_shape(chunk.sizes))))
            metadata.storage_data[MetadataIndex(key, offsets)] = info
        size = torch.Size(weight.loaded_shape(entry.size))
        properties = replace(entry.properties, dtype=self.target_dtype)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, size, chunks)

    def _check_scales(self, key: str, scales: str, expected: Any) -> None:
        found = self._described[scales].size
        if list(found) != list(expected):
            self._refuse(key, f"'{scales}' of shape {list(expected)}", list(found))

    def _refuse(self, key: str, expected: str, found: Any) -> NoReturn:
        raise DamagedCheckpointError(
            f"{self.path}: '{key}' is quantized in a way that does not fit: expected {expected}, found {found}. Check "
            f"block_size, which is {self.block_size}.",
            file=str(self.path),
            key=key,
            expected=expected,
            found=found,
        )

    def _read_item(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        """Read one item; quantized ones in small parts, since they grow on the way."""
        key = item.storage_index.fqn
        weight = self._quantized.get(key)
        if weight is None:
            super()._read_item(stream, item, planner)
            return
        info = self._info(item)
        target = resolve_target(item, planner)
        scales = self._all_scales(weight.scales)
        region = Box(tuple(item.storage_offsets), tuple(item.lengths))
        start_of_chunk = item.storage_index.offset or torch.Size(())
        for part in readable_parts(weight.loaded_shape(info.shape), region, 1, most=QUANTIZED_ELEMENTS):
            at = [offset + inside for offset, inside in zip(start_of_chunk, part.offsets, strict=True)]
            values = weight.read(stream, info, part, at, scales, key)
            inside_target = [place - start for place, start in zip(part.offsets, region.offsets, strict=True)]
            fill(narrowed(target, inside_target, part.sizes), values.to(self.target_dtype), key)
        planner.commit_tensor(item, target)

    def _all_scales(self, key: str) -> torch.Tensor:
        """All scales of a weight, read once."""
        with self._scales_lock:
            if key not in self._scales:
                entry = self._described[key]
                whole = torch.empty(entry.size, dtype=entry.properties.dtype)
                for chunk in entry.chunks:
                    places: Mapping[MetadataIndex, Any] = self.storage_data
                    info: _HFStorageInfo = places[MetadataIndex(key, chunk.offsets)]
                    with opened_as_described(self.fs, info.relative_path, info.header_digest) as stream:
                        read_region(
                            stream,
                            info.position,
                            info.shape,
                            info.dtype,
                            Box((0,) * len(info.shape), tuple(info.shape)),
                            narrowed(whole, chunk.offsets, chunk.sizes),
                            source=info.relative_path,
                            key=key,
                        )
                self._scales[key] = whole
            return self._scales[key]
