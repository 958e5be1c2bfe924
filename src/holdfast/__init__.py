"""Holdfast: checkpoints of distributed PyTorch training that cannot be lost, torn or faked.

    import holdfast as hf

    hf.save(state, "runs/a/step-100")            # collective with N processes, plain with one
    pending = hf.async_save(state, "runs/a/step-200")   # the same, while training goes on
    report = hf.load(state, "runs/a/step-100")   # in place, any layout; says what it did
    ckpt = hf.open("runs/a/step-100")            # lazy: no process group, no template, no pickle
    ckpt["model.layers.0.wq"][0:128]             # reads only what that takes

    with hf.CheckpointManager("runs/a", every_steps=500, keep_last=3) as manager:
        restored = manager.restore(state)        # the newest that is whole; None on a fresh start
        manager.maybe_save(step, state)          # after every step

    hf.verify("runs/a/step-100")                 # every digest; lists all damage
    hf.diff("runs/a/step-100", "runs/a/step-200")       # keys, shapes, dtypes, values
    hf.export("runs/a/step-100", "model-hf")     # a Hugging Face folder; hf.convert knows the other formats

The same is there for the terminal: ``holdfast --help``.

``holdfast.dcp`` is a drop-in for ``torch.distributed.checkpoint``: change the import, keep the files.
Importing this package needs no torch; saving and loading do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast import errors, keep
from holdfast.checkpoint import Checkpoint
from holdfast.checkpoint import open_checkpoint as open
from holdfast.errors import CheckpointException, HoldfastError, MissingPackageError
from holdfast.formats.native.declared import declare
from holdfast.load_report import LoadReport
from holdfast.save_report import SaveReport
from holdfast.version import __version__
from holdfast.watching import Event, subscribe, trace_to

if TYPE_CHECKING:
    from holdfast.converting.convert import convert
    from holdfast.converting.export import export
    from holdfast.converting.report import ConversionReport
    from holdfast.inspecting.damage import VerifyReport
    from holdfast.inspecting.diff import diff
    from holdfast.inspecting.diff_report import DiffReport
    from holdfast.inspecting.explain import explain
    from holdfast.inspecting.explanation import Explanation
    from holdfast.inspecting.statistics import Statistics
    from holdfast.inspecting.verify import verify
    from holdfast.manager.manager import CheckpointManager
    from holdfast.manager.restoring import RestoredStep
    from holdfast.manager.steps import StepInfo
    from holdfast.repairing.repair import repair
    from holdfast.repairing.report import RepairReport
    from holdfast.reporting.report import Report
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
    "CheckpointManager",
    "ConversionReport",
    "DiffReport",
    "Event",
    "Explanation",
    "HoldfastError",
    "HoldfastReader",
    "HoldfastWriter",
    "LoadReport",
    "PendingSave",
    "PerRank",
    "RepairReport",
    "Report",
    "RestoredStep",
    "RngState",
    "SaveProgress",
    "SaveReport",
    "Statistics",
    "StepInfo",
    "VerifyReport",
    "__version__",
    "async_save",
    "convert",
    "declare",
    "diff",
    "errors",
    "explain",
    "export",
    "keep",
    "load",
    "open",
    "repair",
    "save",
    "subscribe",
    "trace_to",
    "verify",
]

_LATER = {
    "ConversionReport": "holdfast.converting.report",
    "DiffReport": "holdfast.inspecting.diff_report",
    "Explanation": "holdfast.inspecting.explanation",
    "RepairReport": "holdfast.repairing.report",
    "Report": "holdfast.reporting.report",
    "Statistics": "holdfast.inspecting.statistics",
    "VerifyReport": "holdfast.inspecting.damage",
    "convert": "holdfast.converting.convert",
    "diff": "holdfast.inspecting.diff",
    "explain": "holdfast.inspecting.explain",
    "export": "holdfast.converting.export",
    "repair": "holdfast.repairing.repair",
    "verify": "holdfast.inspecting.verify",
}
"""What programs that only save and load need not wait for."""

_NEED_TORCH = {
    "CheckpointManager": "holdfast.manager.manager",
    "HoldfastReader": "holdfast.stock",
    "HoldfastWriter": "holdfast.stock",
    "PendingSave": "holdfast.verbs.pending_save",
    "PerRank": "holdfast.states.per_rank",
    "RestoredStep": "holdfast.manager.restoring",
    "RngState": "holdfast.states.rng",
    "SaveProgress": "holdfast.verbs.pending_save",
    "StepInfo": "holdfast.manager.steps",
    "async_save": "holdfast.verbs.async_save",
    "load": "holdfast.verbs.load",
    "save": "holdfast.verbs.save",
}


def __getattr__(name: str) -> Any:
    module = _LATER.get(name) or _NEED_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(module), name)
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
