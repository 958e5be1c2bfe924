"""From what a user calls a place to the store that is there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast._stores.local_store import LocalStore
from holdfast._stores.memory_store import MemoryStore
from holdfast._stores.store import Store
from holdfast.errors import MissingPackageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_URL_IN_A_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/[^/]")
_SUPPORTED = (
    "paths, file:///folder, memory://name, URLs that fsspec knows such as s3://bucket/folder, and objects of classes "
    "that extend holdfast.stores.Store"
)


def store_at(place: str | os.PathLike[str] | Store) -> Store:
    """The store at a path or URL. A relative path is that of now, even if the program changes its folder later.

    >>> store_at("memory://run/step-1")
    MemoryStore('memory://run/step-1')
    >>> store_at("/checkpoints/step-1/")
    LocalStore('/checkpoints/step-1')
    >>> store_at("carrier-pigeon://loft")
    Traceback (most recent call last):
    ValueError: there is no store for carrier-pigeon://loft. Supported are paths, ...
    """
    if isinstance(place, Store):
        return place
    path = local_path(place)
    if path is not None:
        return LocalStore(path)
    url = os.fsdecode(place)
    if url.lower().startswith("memory://"):
        return MemoryStore(url[len("memory://") :])
    url = url_of_fsspec(url, f"there is no store for {url}. Supported are {_SUPPORTED}")
    from holdfast._stores.fsspec_store import FsspecStore

    return FsspecStore(url)


def url_of_fsspec(url: str, refusal: str) -> str:
    """The URL as fsspec spells it. Raises if that is not installed, or, with ``refusal``, has no such protocol.

    A protocol that it knows may need another package, which is named when the URL is opened.
    """
    protocol, slashes, rest = url.partition("://")
    url = protocol.lower() + slashes + rest
    try:
        from holdfast._stores.fsspec_filesystem import FsspecFileSystem
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise MissingPackageError(
            f"{url} is reached through fsspec, which is not installed: pip install 'holdfast[fsspec]', and the package "
            "of its protocol, such as s3fs",
            install="holdfast[fsspec]",
        ) from error
    if not FsspecFileSystem.validate_checkpoint_id(url):
        raise ValueError(refusal)
    return url


def local_path(place: str | os.PathLike[str] | Store) -> Path | None:
    """The path on this machine that a user means, as it is now; None for other places.

    >>> local_path("file:///checkpoints/step%201")
    PosixPath('/checkpoints/step 1')
    >>> local_path("memory://run") is None
    True
    """
    if isinstance(place, Store):
        return None
    if not isinstance(place, (str, bytes, os.PathLike)):
        raise TypeError(f"the place of a checkpoint is a path, a URL or a store, not {place!r}")
    path = os.fsdecode(place)
    if not path:
        raise ValueError("the path of a checkpoint is empty; give the path of a folder")
    if isinstance(place, os.PathLike) and _URL_IN_A_PATH.match(path):
        raise ValueError(f"{path} was a URL until it was made a path, which takes slashes away; give it as a str")
    scheme = _URL.match(path)
    if scheme is None:
        return Path(path).absolute()
    return Path(_path_of_file_url(path)) if scheme[0].lower() in ("file://", "local://") else None


def in_messages(place: Any) -> str:
    """What a place is called in messages, and by which ranks compare it. What is wrong with it is reported later.

    >>> in_messages("/checkpoints/step-1/"), in_messages(7)
    ('/checkpoints/step-1', '7')
    """
    try:
        return store_at(place).location
    except Exception:
        return repr(place)


def _path_of_file_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"{url} names no folder of this machine; such URLs have three slashes, as in file:///folder")
    if parts.query or parts.fragment:
        raise ValueError(f"{url} has a ? or #; write %3F or %23 if the folder is called so")
    return unquote(parts.path, errors="surrogateescape")
