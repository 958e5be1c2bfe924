"""Finds what can be found in safetensors files, which have no digests: sizes, headers, what cannot be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast._base.texts import some_of
from holdfast._base.threads import work_through
from holdfast._base.tuning import READERS, VERIFIED_BYTES, VERIFIED_TOGETHER
from holdfast._formats.hf_folder.names import INDEX_NAME, SUFFIX, is_inside_folder
from holdfast._formats.safetensors.header import Header, read_header
from holdfast._formats.safetensors.source import SafetensorsSource
from holdfast._formats.source import ChunkPlace, DiscardingArray, ReadRequest
from holdfast._tools.inspecting.damage import Damage
from holdfast._watching.progress import Progress
from holdfast.errors import HoldfastError


class SafetensorsCheck:
    """One look at all tensors, or at some."""

    def __init__(self, source: SafetensorsSource, chosen: Callable[[str], bool] | None, memory: int | None) -> None:
        self._source = source
        self._chosen = chosen
        self._keys = [key for key in source.tensors if chosen is None or chosen(key)]
        self._memory = memory
        self._lock = threading.Lock()
        self.damage: list[Damage] = []
        self.doubts: list[str] = []
        self.has_digests = True

    def run(self, on_total: Callable[[int], Progress]) -> None:
        """Find all damage. ``on_total`` gets the number of bytes to read."""
        self._compare_index()
        progress = on_total(sum(self._source.tensors[key].nbytes for key in self._keys))
        threads = READERS if self._memory is None else 1
        work_through(self._lots(), lambda keys: self._look_at(keys, progress), threads, "holdfast-inspect")

    def _compare_index(self) -> None:
        """Whether the index names all that is there, and what it says of the sum."""
        check = self._source.check_index()
        if check is None:
            return
        for file, keys in check.unlisted.items():
            lost = tuple(key for key in keys if self._chosen is None or self._chosen(key))
            if lost:
                problem = f"does not name tensors that are in {file}, so that no program reads them; `holdfast repair` "
                self.damage.append(Damage(INDEX_NAME, problem + "makes the index again from the files", lost))
        if check.unlisted or check.stated_bytes in (None, check.listed_bytes):
            return
        stated, listed = f"{check.stated_bytes:,} bytes", f"{check.listed_bytes:,} bytes"
        if check.is_exact or check.missing:
            gone = f"; {some_of(check.missing)} is neither listed nor there" if check.missing else ""
            problem = f"names tensors of another total_size than it says{gone}"
            self.damage.append(Damage(INDEX_NAME, problem, expected=stated, found=listed))
        else:
            self.doubts.append(
                f"{INDEX_NAME} says that all tensors have {stated} (total_size), and those it names have {listed}. "
                "Some programs count tied tensors twice, or in another dtype; if yours does not, tensors are missing."
            )

    def _lots(self) -> Iterator[list[str]]:
        """Tensors that are read together: to open a file for each of many small ones would take long."""
        lot: list[str] = []
        nbytes = 0
        for key in self._keys:
            if lot and (nbytes >= VERIFIED_BYTES or len(lot) >= VERIFIED_TOGETHER):
                yield lot
                lot, nbytes = [], 0
            lot.append(key)
            nbytes += self._source.tensors[key].nbytes
        if lot:
            yield lot

    def _look_at(self, keys: list[str], progress: Progress) -> None:
        chunks = [(key, chunk) for key in keys for chunk in self._source.chunk_places(key)]
        try:
            self._source.read([self._request(*chunk) for chunk in chunks], memory=self._memory)
        except (HoldfastError, OSError):
            for key, chunk in chunks:
                self._look_at_one(key, chunk)
        progress.advance(sum(chunk.nbytes for _, chunk in chunks))

    def _look_at_one(self, key: str, chunk: ChunkPlace) -> None:
        try:
            self._source.read([self._request(key, chunk)], memory=self._memory)
        except (HoldfastError, OSError) as error:
            end = None if chunk.begin is None else chunk.begin + chunk.nbytes
            with self._lock:
                self.damage.append(Damage(chunk.file, f"cannot be read: {error}", (key,), chunk.begin, end))

    def _request(self, key: str, chunk: ChunkPlace) -> ReadRequest:
        carrier = self._source.tensors[key].dtype.carrier
        return ReadRequest(key, chunk.offsets, chunk.sizes, DiscardingArray(chunk.sizes, carrier))


def damage_of_folder(path: Path) -> list[Damage]:
    """All that is wrong with the files of a folder that cannot be opened as a whole, each looked at for itself."""
    index = path / INDEX_NAME
    names: dict[str, list[str]] = {file.name: [] for file in sorted(path.glob(f"*{SUFFIX}")) if not index.exists()}
    found: list[Damage] = []
    if index.exists():
        try:
            listed = json.loads(index.read_bytes())["weight_map"]
            for key, name in listed.items():
                if is_inside_folder(name):
                    names.setdefault(name, []).append(key)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            found.append(Damage(INDEX_NAME, f"is not an index of a model: {type(error).__name__}: {error}"))
    for name, keys in names.items():
        found += _damage_of_file(path / name, name, keys)
    return found


def _damage_of_file(path: Path, name: str, keys: list[str]) -> list[Damage]:
    try:
        with path.open("rb") as stream:
            header: Header = read_header(stream, str(path))
    except FileNotFoundError:
        return [Damage(name, "is missing", tuple(keys), expected="a file", found="no such file")]
    except (HoldfastError, OSError) as error:
        return [Damage(name, f"cannot be read: {error}", tuple(keys))]
    lost = tuple(key for key in keys if key not in header.tensors)
    return [Damage(name, "does not have all tensors that the index says are in it", lost)] if lost else []
