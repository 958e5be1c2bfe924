"""Reads Hugging Face folders of quantized models, and gives out the numbers that the stored ones stand for.

Two kinds are known. Block-scaled: ``X.weight`` goes with ``X.weight_scale_inv``, a number for every block of 128 x 128
elements, which is multiplied with them. MXFP4: ``X_blocks`` holds two 4-bit floats per byte, and ``X_scales`` an
exponent for every block of them.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, NoReturn

import torch

from holdfast.boxes import Box
from holdfast.errors import DamagedCheckpointError
from holdfast.formats.safetensors.torch_dtypes import FLOAT8
from holdfast.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planning.plan import LoadPlan, ReadItem
from holdfast.planning.planner import LoadPlanner
from holdfast.storage.destinations import resolve_target
from holdfast.storage.filling import fill, narrowed
from holdfast.storage.hf_files import _HFStorageInfo
from holdfast.storage.hf_opening import opened_as_described
from holdfast.storage.hf_reader import HuggingFaceStorageReader
from holdfast.storage.quantized_weights import BlockScaled, Mxfp4, QuantizedWeight
from holdfast.storage.readable_parts import readable_parts
from holdfast.storage.region_reads import read_region
from holdfast.stores.filesystem import AnyPath
from holdfast.tuning import QUANTIZED_ELEMENTS


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
                    places: dict[MetadataIndex, Any] = self.storage_data
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
