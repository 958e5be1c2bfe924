"""Which versions of torch Holdfast is tested with."""

from __future__ import annotations

import logging
import re
from functools import cache

from holdfast.errors import MissingPackageError

OLDEST = (2, 6)
NEWEST = (2, 15)
"""The oldest and the newest minor version that the tests are run with; ``docs/versions.md`` has the table."""

logger = logging.getLogger("holdfast.compat")


def minor_version(version: str) -> tuple[int, int] | None:
    """The two numbers that a version of torch begins with; None if it has another form.

    >>> minor_version("2.15.0a0+git12"), minor_version("nightly")
    ((2, 15), None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


@cache
def check_torch(version: str) -> None:
    """Refuse a torch that is too old, and log one line about one that is newer than any tested one."""
    minor = minor_version(version)
    if minor is not None and minor < OLDEST:
        needed = f"torch>={_name(OLDEST)}"
        raise MissingPackageError(
            f"torch {version} is installed, which is older than Holdfast can work with (pip install '{needed}'). "
            "Checkpoints of Holdfast and safetensors files are read without torch.",
            install=needed,
        )
    if minor is None or minor > NEWEST:
        logger.info(
            "torch %s is newer than any that this version of Holdfast is tested with (%s to %s)",
            version,
            _name(OLDEST),
            _name(NEWEST),
        )


def _name(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
