"""From what a user calls a place to the store that is there."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from holdfast.stores.local_store import LocalStore
from holdfast.stores.memory_store import MemoryStore
from holdfast.stores.store import Store

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_URL_IN_A_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/[^/]")
_SUPPORTED = "paths, file:///folder, memory://name, and objects of classes that extend holdfast.stores.store.Store"


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
    path = os.fsdecode(place)
    if not path:
        raise ValueError("the path of a checkpoint is empty; give the path of a folder")
    if isinstance(place, os.PathLike) and _URL_IN_A_PATH.match(path):
        raise ValueError(f"{path} was a URL until it was made a path, which takes slashes away; give it as a str")
    scheme = _URL.match(path)
    if scheme is None:
        return LocalStore(path)
    if scheme[0].lower() == "memory://":
        return MemoryStore(path[scheme.end() :])
    if scheme[0].lower() == "file://":
        return LocalStore(_path_of_file_url(path))
    raise ValueError(f"there is no store for {path}. Supported are {_SUPPORTED}")


def _path_of_file_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(f"{url} names no folder of this machine; such URLs have three slashes, as in file:///folder")
    if parts.query or parts.fragment:
        raise ValueError(f"{url} has a ? or #; write %3F or %23 if the folder is called so")
    return unquote(parts.path, errors="surrogateescape")
