"""Holdfast: checkpoints of distributed PyTorch training that cannot be lost, torn or faked.

    import holdfast

    holdfast.save(state, "runs/a/step-100")  # collective with N processes, plain with one
    pending = holdfast.async_save(state, "runs/a/step-200")  # the same, while training goes on
    report = holdfast.load(state, "runs/a/step-100")  # in place, any layout; says what it did

    nested = holdfast.read("runs/a/step-100")  # what is stored, without a state to load into
    checkpoint = holdfast.open("runs/a/step-100")  # lazy: no process group, no template, no pickle
    checkpoint["model.layers.0.wq"][0:128]  # reads only what that takes

    with holdfast.CheckpointManager("runs/a", every_steps=500, keep_last=3) as manager:
        restored = manager.restore(state)  # the newest that is intact; None on a fresh start
        manager.maybe_save(step, state)  # after every step

    holdfast.verify("runs/a/step-100")  # every digest; lists all damage
    holdfast.diff("runs/a/step-100", "runs/a/step-200")  # keys, shapes, dtypes, values
    holdfast.export("runs/a/step-100", "model-hf")  # a Hugging Face folder; holdfast.convert knows other formats

The same is there for the terminal: ``holdfast --help``. ``docs/api.md`` lists every public name.

Public besides are ``holdfast.dcp``, a drop-in for ``torch.distributed.checkpoint`` (change the import, keep the files),
``holdfast.stores``, ``keep``, ``errors``, ``watching``, ``testing`` and ``integrations``. What begins with an
underscore is private. Importing this package needs no torch; saving and loading do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast import errors, keep
from holdfast._formats.native.registered_types import register_type
from holdfast._load.checkpoint import Checkpoint, read
from holdfast._load.checkpoint import open_checkpoint as open
from holdfast._load.report import LoadReport
from holdfast._save.report import SaveReport
from holdfast._version import __version__
from holdfast.errors import CheckpointException, HoldfastError, MissingPackageError
from holdfast.watching import Event, subscribe, trace_to

if TYPE_CHECKING:
    from holdfast._load.load import load
    from holdfast._manager.manager import CheckpointManager
    from holdfast._manager.options import Background, OnFullDisk, OnSignal, Retention, RunOptions
    from holdfast._manager.restoring import RestoredStep
    from holdfast._manager.steps import StepInfo
    from holdfast._save.async_save import async_save
    from holdfast._save.options import SaveOptions
    from holdfast._save.pending import PendingSave, SaveProgress
    from holdfast._save.save import save
    from holdfast._state.per_rank import PerRank
    from holdfast._state.random_streams import RngState
    from holdfast._tools.converting.convert import convert
    from holdfast._tools.converting.export import export
    from holdfast._tools.converting.report import ConversionReport
    from holdfast._tools.inspecting.damage import VerifyReport
    from holdfast._tools.inspecting.diff import diff
    from holdfast._tools.inspecting.diff_report import DiffReport
    from holdfast._tools.inspecting.explain import explain
    from holdfast._tools.inspecting.explanation import Explanation
    from holdfast._tools.inspecting.statistics import Statistics
    from holdfast._tools.inspecting.verify import verify
    from holdfast._tools.repairing.repair import repair
    from holdfast._tools.repairing.report import RepairReport
    from holdfast._tools.reporting.report import HtmlReport
    from holdfast._tools.serving.server import RunServer, serve
    from holdfast.integrations.torch_dcp import HoldfastReader, HoldfastWriter

__all__ = [
    "Background",
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
    "HtmlReport",
    "LoadReport",
    "OnFullDisk",
    "OnSignal",
    "PendingSave",
    "PerRank",
    "RepairReport",
    "RestoredStep",
    "Retention",
    "RngState",
    "RunOptions",
    "RunServer",
    "SaveOptions",
    "SaveProgress",
    "SaveReport",
    "Statistics",
    "StepInfo",
    "VerifyReport",
    "__version__",
    "async_save",
    "convert",
    "diff",
    "errors",
    "explain",
    "export",
    "keep",
    "load",
    "open",
    "read",
    "register_type",
    "repair",
    "save",
    "serve",
    "subscribe",
    "trace_to",
    "verify",
]

_LATE = {
    "Background": "holdfast._manager.options",
    "OnFullDisk": "holdfast._manager.options",
    "OnSignal": "holdfast._manager.options",
    "Retention": "holdfast._manager.options",
    "RunOptions": "holdfast._manager.options",
    "SaveOptions": "holdfast._save.options",
    "CheckpointManager": "holdfast._manager.manager",
    "ConversionReport": "holdfast._tools.converting.report",
    "DiffReport": "holdfast._tools.inspecting.diff_report",
    "Explanation": "holdfast._tools.inspecting.explanation",
    "HoldfastReader": "holdfast.integrations.torch_dcp",
    "HoldfastWriter": "holdfast.integrations.torch_dcp",
    "HtmlReport": "holdfast._tools.reporting.report",
    "PendingSave": "holdfast._save.pending",
    "PerRank": "holdfast._state.per_rank",
    "RepairReport": "holdfast._tools.repairing.report",
    "RestoredStep": "holdfast._manager.restoring",
    "RngState": "holdfast._state.random_streams",
    "RunServer": "holdfast._tools.serving.server",
    "SaveProgress": "holdfast._save.pending",
    "Statistics": "holdfast._tools.inspecting.statistics",
    "StepInfo": "holdfast._manager.steps",
    "VerifyReport": "holdfast._tools.inspecting.damage",
    "async_save": "holdfast._save.async_save",
    "convert": "holdfast._tools.converting.convert",
    "diff": "holdfast._tools.inspecting.diff",
    "explain": "holdfast._tools.inspecting.explain",
    "export": "holdfast._tools.converting.export",
    "load": "holdfast._load.load",
    "repair": "holdfast._tools.repairing.repair",
    "save": "holdfast._save.save",
    "serve": "holdfast._tools.serving.server",
    "verify": "holdfast._tools.inspecting.verify",
}
"""What is imported when it is asked for: it needs torch, or programs that only save and load need not wait for it."""


def __getattr__(name: str) -> Any:
    module = _LATE.get(name)
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
