"""Puts the complete result of a conversion under its final name, in one step, in place of an older one if that may be.

At every moment there is the old result or the new one, complete: under the name, or, where the system cannot exchange
two names and was stopped in between, in the work folder, whose clean-up puts it back. Files beside an old checkpoint
that are not part of it, such as a tokenizer, stay.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast._formats.format_names import START, format_of_file, is_of_a_checkpoint
from holdfast._formats.hf_folder import names as hf_names
from holdfast._formats.native.names import generation_of
from holdfast._load.opening import open_source
from holdfast._stores.durable_files import flush_to_disk, sync_folder
from holdfast._tools.converting.work_folders import ResultFolder
from holdfast.errors import CheckpointExistsError, HoldfastError

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def refuse_what_is_there(final: Path, *, overwrite: bool, is_file: bool) -> None:
    """Raise if there is something at a destination that must not be replaced."""
    if not os.path.lexists(final) or _is_empty_folder(final):
        return
    what = _what_is_there(final)
    if not overwrite:
        advice = "pass overwrite=True (--overwrite) to replace it in one step" if what is None else "remove it first"
        raise _in_the_way(final, "there is something already", f"Write to another place, or {advice}.")
    if what is not None:
        raise _in_the_way(final, what, "Write to another place, or remove it first.")
    if final.is_file() != is_file:
        kinds = ("a file", "a folder") if is_file else ("a folder", "a file")
        raise _in_the_way(final, f"{kinds[0]} cannot replace {kinds[1]}", "Write to another place, or remove it first.")


def put_in_place(work: ResultFolder, *, overwrite: bool) -> None:
    """Give a complete file or folder its name. What was there before is in the work folder on return, or is gone."""
    new, final = work.new, work.final
    if new.is_dir():
        if overwrite and final.is_dir():
            _keep_other_files(final, new)
        sync_folder(new)
    try:
        _move(work, overwrite=overwrite)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise _in_the_way(final, "something was put there meanwhile", "Look what it is, and try again.") from error
    sync_folder(final.parent)


def _what_is_there(final: Path) -> str | None:
    """Why something cannot be replaced; None if it is a checkpoint and nothing else."""
    if final.is_file():
        with final.open("rb") as stream:
            format_ = format_of_file("", stream.read(START))  # whatever it is called
        return None if format_ is not None else "there is a file that is not a checkpoint"
    if not final.is_dir():
        return "there is something that is not a checkpoint"
    with os.scandir(final) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    if not any(is_of_a_checkpoint(name) for name, _ in found):
        return "there is a folder that holds no checkpoint"
    folders = [name for name, is_folder in found if is_folder]
    if folders:
        return f"there is a folder that has others in it ({folders[0]})"
    others = _other_files(final, [name for name, _ in found])
    return None if not others else f"there are files of other models beside the checkpoint ({others[0]})"


def _other_files(final: Path, names: Iterable[str]) -> list[str]:
    """Safetensors files in a folder that are not part of its checkpoint: lost with it, or taken for it."""
    try:
        with open_source(final) as source:
            own = {name for name, _ in source.files()}
    except HoldfastError:  # what cannot be opened is known by its name alone
        own = set(hf_names.model_files(names))
    models = (name for name in names if name.endswith(hf_names.SUFFIX) and generation_of(name) is None)
    return sorted(name for name in models if name not in own)


def _in_the_way(final: Path, what: str, advice: str) -> CheckpointExistsError:
    return CheckpointExistsError(f"{final}: {what}, so nothing was written. {advice}", path=str(final))


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _keep_other_files(old: Path, new: Path) -> None:
    """Take files along that are not part of the old checkpoint, unless the new one has one of that name."""
    with os.scandir(old) as entries:
        for entry in entries:
            target = new / entry.name
            if entry.is_dir(follow_symlinks=False) or is_of_a_checkpoint(entry.name) or target.exists():
                continue
            try:
                os.link(entry.path, target, follow_symlinks=False)
            except OSError:
                _copy_durably(entry.path, target)


def _copy_durably(path: str, target: Path) -> None:
    shutil.copy2(path, target, follow_symlinks=False)
    if target.is_symlink():
        return
    with target.open("rb") as stream:
        flush_to_disk(stream)


def _move(work: ResultFolder, *, overwrite: bool) -> None:
    new, final = work.new, work.final
    if not os.path.lexists(final) or _is_empty_folder(final):
        if new.is_dir() and final.is_dir():
            os.rename(new, final)  # takes the place of an empty folder, and fails if it is not empty any more
        else:
            _rename_to_free_name(new, final)
    elif not overwrite:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    elif new.is_dir():
        _swap(work)
    else:
        os.replace(new, final)


def _rename_to_free_name(new: Path, final: Path) -> None:
    if _rename(new, final, _NOREPLACE):
        return
    if not new.is_dir():
        os.link(new, final)  # fails if the name is taken
        os.unlink(new)
    else:
        os.rename(new, final)  # fails if there is a folder with something in it


def _swap(work: ResultFolder) -> None:
    """Put a folder in the place of another one, which is in the work folder then."""
    if _rename(work.new, work.final, _EXCHANGE):
        return
    # Without that call there is a moment in which the name is free. Whatever ends it, an error, an interrupt or a kill:
    # who clears the work folder sees that the new one is still in there, and puts the old one back.
    os.rename(work.final, work.old)
    os.rename(work.new, work.final)


def _rename(new: Path, final: Path, how: int) -> bool:
    """Rename in a special way. False if the system, or the file system, does not know it."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(final), how) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(final))


def _renameat2() -> Any:
    if os.name != "posix":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return function
