"""Reading a pickle as data: a small machine for pickle's opcodes that never calls what a file names.

A pickle is a program. Here every name in it is looked up in a closed table of :class:`AllowedName` entries, which
say what the file may do with that name; the functions behind them check what they are given. Nothing is
imported, only fresh objects get attributes, and no memory is reserved because a file says so.

Why not a ``pickle.Unpickler`` with its own ``find_class``? It does harm without asking ``find_class``:
``LONG_BINPUT`` reserves and clears gigabytes for eight bytes of input, ``EXT1`` takes objects out of a cache
of the whole process, ``BUILD`` sets attributes of classes and functions, and a deeply nested tuple as a
dictionary key overflows the C stack. What this machine costs in speed, an index gets back through
:attr:`AllowedName.shortcut`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from holdfast._formats.archives.known_names import Find, Refusal, one_bit_away
from holdfast._formats.archives.pickle_machine import Machine
from holdfast._version import __version__
from holdfast.errors import DamagedCheckpointError, HoldfastError, NewerFormatError, RefusedPickleError

INDEX_PACKAGE = "torch.distributed.checkpoint"
_MODULES_OF_TENSORS = ("torch", "torch._utils", "torch._tensor", "torch.storage", "torch.serialization")


def load(
    data: bytes,
    find: Find,
    *,
    source: str,
    key: str | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """The object that ``data`` describes, made of what ``find`` knows. Bytes after its end are an error."""
    machine = Machine(data, find, persistent_load)
    try:
        result = machine.run()
    except HoldfastError:
        raise
    except Refusal as refusal:
        module, name = refusal.args
        if not _is_of_another_torch(module, name):
            raise refused_pickle(module, name, key=key) from None
        if _is_misspelt(module, name, find):
            problem = ValueError(f"{module}.{name}, which is one bit away from a name that is known")
            raise damaged_pickle(problem, source=source, key=key, position=machine.position) from None
        raise newer_format(f"{module}.{name}", source=source, key=key) from None
    except Exception as error:  # MemoryError and RecursionError too: the file asked for it
        raise damaged_pickle(error, source=source, key=key, position=machine.position) from error
    if machine.position != len(data):
        problem = ValueError(f"{len(data) - machine.position} bytes after the end")
        raise damaged_pickle(problem, source=source, key=key, position=machine.position)
    return result


def damaged_pickle(error: Exception, *, source: str, key: str | None, position: int) -> DamagedCheckpointError:
    """The error for a pickle that says something impossible."""
    found = f"{type(error).__name__}: {error} (at byte {position})"
    about = f" of '{key}'" if key is not None else ""
    return DamagedCheckpointError(
        f"{source}: the stored description{about} cannot be understood: {found}. The bytes are not what a "
        "save writes; load another checkpoint, or copy this one again from where it came from.",
        file=source,
        key=key,
        expected="a pickle of plain data",
        found=found,
    )


def newer_format(unknown: str, *, source: str, key: str | None) -> NewerFormatError:
    """The error for a record, field or dtype that this version does not know."""
    about = f" of '{key}'" if key is not None else ""
    return NewerFormatError(
        f"{source}: the stored description{about} uses {unknown}, which Holdfast {__version__} does not know "
        f"(torch {torch.__version__} is installed). Most likely a newer torch wrote it. Install the newest torch and "
        "Holdfast, or convert it with the version that wrote it.",
        file=source,
        key=key,
        global_name=unknown,
    )


def _is_of_another_torch(module: str, name: str) -> bool:
    """Whether a name that is not in the table is one of torch's that the installed torch does not have.

    Nothing is imported to find out: what is not loaded (torch's own checkpoint package, mostly) is known by the table.
    """
    loaded = sys.modules.get(module)
    if loaded is None or module.startswith(INDEX_PACKAGE):
        return module.startswith(INDEX_PACKAGE)
    return module in _MODULES_OF_TENSORS and name.isidentifier() and name not in vars(loaded)


def _is_misspelt(module: str, name: str, find: Find) -> bool:
    """Whether one flipped bit makes a known name of an unknown one. Then it is damage."""
    return any(find(other, name) for other in one_bit_away(module)) or any(
        find(module, other) for other in one_bit_away(name)
    )


def refused_pickle(module: str, name: str, *, key: str | None) -> RefusedPickleError:
    """The error for a name that is not in the table, with the ways to allow it."""
    full_name = f"{module}.{name}"
    about = f"'{key}'" if key is not None else "The index"
    return RefusedPickleError(
        f"{about} was saved with {full_name}, which Holdfast does not run on its own: a file could use it "
        f"to run any code. If you know the class, allow just it: torch.serialization.add_safe_globals([{name}]). "
        "Only if you trust whoever made the checkpoint, allow everything: "
        "DefaultLoadPlanner(allow_pickle=True) for values, FileSystemReader(path, allow_pickle=True) for "
        "the index, HOLDFAST_ALLOW_PICKLE=1 or holdfast._settings.override(allow_pickle=True) for both.",
        key=key,
        global_name=full_name,
    )
