"""Whether reading at a place goes over a network, so that it is worth more to read each byte once."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast._stores.local_store import LocalStore
from holdfast._stores.places import local_path
from holdfast._stores.store import Store

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs"}
)
"""Types of file systems that are on other machines, as Linux calls them."""

_NETWORK_IN_USER_SPACE = ("fuse.", "fuseblk.")
_LOCAL_IN_USER_SPACE = frozenset({"fuse.overlayfs", "fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.ntfs-3g", "fuse.bindfs"})


def is_far(place: str | os.PathLike[str] | Store) -> bool:
    """Whether what is read at a place comes over a network: from an object store, or a file system of other machines.

    >>> is_far("s3://bucket/step-1"), is_far("memory://run/step-1"), is_far("/proc")
    (True, True, False)
    """
    path = Path(place.location) if isinstance(place, LocalStore) else local_path(place)
    return path is None or is_of_network(file_system_of(path))


def is_of_network(kind: str | None) -> bool:
    """Whether a file system of this type is on other machines. One that nobody knows is taken for a local one.

    >>> is_of_network("nfs4"), is_of_network("fuse.s3fs"), is_of_network("ext4"), is_of_network(None)
    (True, True, False, False)
    """
    if kind is None or kind in _LOCAL_IN_USER_SPACE:
        return False
    return kind in _NETWORK or kind.startswith(_NETWORK_IN_USER_SPACE)


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system that a path is on; None where the system does not say.

    >>> file_system_of(Path("/proc/self"))
    'proc'
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
        real = os.path.realpath(path)
    except OSError:
        return None
    best, found = -1, None
    for line in lines:
        fields, _, about = line.partition(" - ")
        point = _unescaped(fields.split(" ")[4])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= best:  # the last one is on top
            best, found = len(point), about.split(" ")[0]
    return found


def _unescaped(point: str) -> str:
    """Spaces and the like are written as octal numbers.

    >>> _unescaped("/my\\\\040disk")
    '/my disk'
    """
    for code in ("040", "011", "012", "134"):
        point = point.replace(f"\\{code}", chr(int(code, 8)))
    return point
