"""Holdfast's own format for programs that call ``torch.distributed.checkpoint`` itself, and want to keep doing so.

    import holdfast
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=holdfast.HoldfastWriter("runs/a/step-100"))
    dcp.load(state, storage_reader=holdfast.HoldfastReader("runs/a/step-100"))

Torch plans and lets its ranks talk; Holdfast writes, commits and reads. What it writes is a checkpoint like any other,
for ``holdfast.load`` and ``holdfast.open`` too.
"""

from __future__ import annotations

from holdfast.integrations._torch_dcp.reader import HoldfastReader
from holdfast.integrations._torch_dcp.writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
