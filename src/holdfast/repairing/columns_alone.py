"""The columns of a checkpoint whose record is lost: what they tell without it.

They are written when all ranks have written their data files, so they prove that these are all there; and their digests
tell whether the data is as it was saved.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import DamagedCheckpointError
from holdfast.formats.native.blocks import Digests, count_blocks
from holdfast.formats.native.record import BLOCK_BYTES, StoredFile
from holdfast.formats.native.repairs import DIGESTS_COMPUTED
from holdfast.formats.safetensors.header import Header, read_header
from holdfast.stores.store import Store


@dataclass(frozen=True)
class ColumnsAlone:
    """Where chunks lie, and digests; not which tensors they are of."""

    chunk_file: Any
    chunk_begin: Any
    digests: Digests
    block_bytes: int = BLOCK_BYTES
    """What writers use. The record would tell, and other numbers of digests do not fit."""
    digests_computed: str = ""
    """When a repair has computed the digests; empty if they are those of the save."""

    @classmethod
    def read(cls, store: Store, name: str) -> ColumnsAlone | None:
        """What a columns file says; None if there is none, or none that makes sense."""
        path = store.path_of(name)
        try:
            data = store.read(name)
            header = read_header(io.BytesIO(data), path)
            column = {
                wanted: np.frombuffer(
                    data, dtype, count=header.tensors[wanted].shape[0], offset=header.position(wanted)
                )
                for wanted, dtype in (("chunk_file", "<u4"), ("chunk_begin", "<u8"), ("digests", "<u4"))
            }
        except (FileNotFoundError, DamagedCheckpointError, KeyError, IndexError, ValueError):
            return None
        computed = header.notes.get(DIGESTS_COMPUTED, "")
        return cls(column["chunk_file"], column["chunk_begin"], column["digests"], digests_computed=computed)

    def speaks_of(self, files: Sequence[StoredFile], headers: Sequence[Header]) -> bool:
        """Whether these are the files that it was written for, all of them."""
        if len(self.digests) != sum(count_blocks(file.nbytes, self.block_bytes) for file in files):
            return False
        if len(self.chunk_file) != len(self.chunk_begin):
            return False
        if len(self.chunk_file) and int(self.chunk_file.max()) >= len(files):
            return False
        for number, header in enumerate(headers):
            told = sorted(self.chunk_begin[self.chunk_file == number].tolist())
            there = sorted(header.position(name) for name, stored in header.tensors.items() if stored.nbytes)
            if told != there:
                return False
        return True
