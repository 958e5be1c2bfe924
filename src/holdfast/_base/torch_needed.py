"""What to say where torch is needed and not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import MissingPackageError


def is_about_torch(error: ImportError) -> bool:
    """Whether an import failed because torch is not installed."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch"


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """For a block that imports torch, or something that does: if it is not installed, say what needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_about_torch(error):
            raise
        raise MissingPackageError(
            f"{what} needs torch, which is not installed (pip install torch). Checkpoints of Holdfast and safetensors "
            "files are read without it.",
            install="torch",
        ) from error
