"""Holdfast: checkpoints of distributed PyTorch training that cannot be lost, torn or faked.

    import holdfast as hf

    hf.save(state, "runs/a/step-100")            # collective with N processes, plain with one
    pending = hf.async_save(state, "runs/a/step-200")   # the same, while training goes on
    report = hf.load(state, "runs/a/step-100")   # in place, any layout; says what it did
    ckpt = hf.open("runs/a/step-100")            # lazy: no process group, no template, no pickle
    ckpt["model.layers.0.wq"][0:128]             # reads only what that takes

``holdfast.dcp`` is a drop-in for ``torch.distributed.checkpoint``: change the import, keep the files.
Importing this package needs no torch; saving and loading do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast import errors
from holdfast.checkpoint import Checkpoint
from holdfast.checkpoint import open_checkpoint as open
from holdfast.errors import CheckpointException, HoldfastError, MissingPackageError
from holdfast.formats.native.declared import declare
from holdfast.load_report import LoadReport
from holdfast.save_report import SaveReport
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.states.per_rank import PerRank
    from holdfast.states.rng import RngState
    from holdfast.stock import HoldfastReader, HoldfastWriter
    from holdfast.verbs.async_save import async_save
    from holdfast.verbs.load import load
    from holdfast.verbs.pending_save import PendingSave, SaveProgress
    from holdfast.verbs.save import save

__all__ = [
    "Checkpoint",
    "CheckpointException",
    "HoldfastError",
    "HoldfastReader",
    "HoldfastWriter",
    "LoadReport",
    "PendingSave",
    "PerRank",
    "RngState",
    "SaveProgress",
    "SaveReport",
    "__version__",
    "async_save",
    "declare",
    "errors",
    "load",
    "open",
    "save",
]

_NEED_TORCH = {
    "HoldfastReader": "holdfast.stock",
    "HoldfastWriter": "holdfast.stock",
    "PendingSave": "holdfast.verbs.pending_save",
    "PerRank": "holdfast.states.per_rank",
    "RngState": "holdfast.states.rng",
    "SaveProgress": "holdfast.verbs.pending_save",
    "async_save": "holdfast.verbs.async_save",
    "load": "holdfast.verbs.load",
    "save": "holdfast.verbs.save",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingPackageError(
            f"holdfast.{name} needs torch, which is not installed. Checkpoints can be opened without it: holdfast.open",
            install="torch",
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
