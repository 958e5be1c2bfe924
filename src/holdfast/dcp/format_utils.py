"""Conversions between DCP checkpoints and single ``torch.save`` files, and loading from such a file on many ranks.

python -m holdfast.dcp.format_utils {torch_to_dcp,dcp_to_torch} SRC DST
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from holdfast._base.arguments import Size
from holdfast._dcp.load_planner import DynamicMetaLoadPlanner
from holdfast._dcp.torch_file_conversions import dcp_to_torch_file, torch_file_to_dcp
from holdfast._dcp.torch_file_reader import BroadcastingTorchSaveReader
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import CheckpointException, HoldfastError

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]

_FAILED, _WRONG_SOURCE = 1, 2


def dcp_to_torch_save(
    dcp_checkpoint_dir: AnyPath,
    torch_save_path: AnyPath,
    *,
    allow_pickle: bool | None = None,
    memory_budget: Size | None = None,
    progress: bool = False,
) -> None:
    """Write a DCP checkpoint as one file that ``torch.load`` reads.

    The file appears when it is complete. Tensors are copied in pieces, however large they are.

    Args:
        dcp_checkpoint_dir: the folder of the checkpoint.
        torch_save_path: the file to write; an existing one is replaced.
        allow_pickle: read values that run code. For checkpoints of trusted authors only.
        memory_budget: bytes that may be allocated for what is on its way, apart from some 2 KB per tensor: 64 MiB by
            default, 256 KiB at least.
        progress: show a progress bar, if the standard error stream is a terminal.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> folder = tempfile.mkdtemp()
        >>> _ = dcp.save({"model": {"w": torch.ones(2)}, "step": 7}, checkpoint_id=folder)
        >>> dcp_to_torch_save(folder, f"{folder}/all.pt")
        >>> torch.load(f"{folder}/all.pt")
        {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    dcp_to_torch_file(
        dcp_checkpoint_dir,
        torch_save_path,
        allow_pickle=allow_pickle,
        memory_budget=memory_budget,
        progress=progress,
    )


def torch_save_to_dcp(
    torch_save_path: AnyPath,
    dcp_checkpoint_dir: AnyPath,
    *,
    allow_pickle: bool | None = None,
    memory_budget: Size | None = None,
    progress: bool = False,
) -> None:
    """Save the dict in a file of ``torch.save`` as a DCP checkpoint, which any number of ranks can load.

    Tensors are copied in pieces, however large they are.

    Args:
        torch_save_path: the file.
        dcp_checkpoint_dir: the folder of the checkpoint; one that is there already is replaced.
        allow_pickle: let the file run code. For files of trusted authors only.
        memory_budget: bytes that may be allocated for what is on its way, apart from some 2 KB per tensor: 64 MiB by
            default, 256 KiB at least.
        progress: show a progress bar, if the standard error stream is a terminal.

    Example:
        >>> import tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"w": torch.ones(2), "step": 7}, f"{folder}/all.pt")
        >>> torch_save_to_dcp(f"{folder}/all.pt", f"{folder}/dcp")
        >>> state = {"w": torch.zeros(2), "step": 0}
        >>> dcp.load(state, checkpoint_id=f"{folder}/dcp")
        >>> state
        {'w': tensor([1., 1.]), 'step': 7}
    """
    torch_file_to_dcp(
        torch_save_path,
        dcp_checkpoint_dir,
        allow_pickle=allow_pickle,
        memory_budget=memory_budget,
        progress=progress,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.dcp.format_utils",
        description="Convert a torch.save file to a DCP checkpoint, or a DCP checkpoint to a torch.save file.",
        epilog="Exit status: 0 done; 2 wrong arguments, or a source that is missing, damaged or of another kind; 1 "
        "anything else went wrong.",
    )
    parser.add_argument("mode", choices=["torch_to_dcp", "dcp_to_torch"], help="which way to convert")
    parser.add_argument("src", help="the checkpoint to convert")
    parser.add_argument("dst", help="where the result goes")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        default=None,
        help="let the source run any code it names; only if you trust its author",
    )
    arguments = parser.parse_args(argv)
    for name in ("src", "dst"):
        if not getattr(arguments, name):  # it would mean the current folder, and comes from a variable that is not set
            parser.error(f"{name} is empty; give a path")
    return arguments


def _main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    arguments = _arguments(argv)
    mode, src, dst = arguments.mode, arguments.src, arguments.dst
    convert = torch_save_to_dcp if mode == "torch_to_dcp" else dcp_to_torch_save
    sys.stdout.write(f"Converting checkpoint from {src} to {dst} using method: '{mode}'\n")
    sys.stdout.flush()
    try:
        convert(src, dst, allow_pickle=arguments.allow_pickle, progress=True)
    except Exception as error:
        cause = _cause_of(error)
        sys.stderr.write(
            f"error: {cause if isinstance(cause, HoldfastError) else f'{type(cause).__name__}: {cause}'}\n"
        )
        return _WRONG_SOURCE if isinstance(cause, HoldfastError) else _FAILED
    return 0


def _cause_of(error: Exception) -> BaseException:
    """What went wrong, without the report of which rank it went wrong on: there is only one."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


if __name__ == "__main__":
    sys.exit(_main())
