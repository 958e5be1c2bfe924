"""Whole states, saved and loaded by all contenders in this process: a transformer, many small tensors, a huge one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import holdfast
from benchmarks import page_cache, probes
from benchmarks.contenders import (
    LOADING_PEERS,
    MAKERS,
    MAPPED_LOAD,
    OURS,
    OURS_DCP,
    PEERS,
    PLAIN_LOAD,
    SLOW_PEERS,
    STOCK,
    STOCK_VARIANTS,
    Contender,
    why_missing,
)
from benchmarks.rounds import Turn, measure, nothing, one_line
from benchmarks.states import WORKLOADS, bytes_of, differing_key, few_bytes, filled, room_for, shapes_of, wipe
from benchmarks.suite import Suite, remove
from holdfast._base.tuning import READERS

MEMORY_COPY = "probe: memory copy"
DIRECT_WRITES = {f"probe: direct write, {count} at once": count for count in (1, 2)}
CACHED_WRITE = "probe: cached write, early write-back"
CACHED_READ = "probe: cached read"
DIRECT_READS = {f"probe: direct read, {count} at once": count for count in (4, 8)}
BUFFERED_READ = "probe: buffered read"
OURS_FROM_STOCK = "holdfast, files of stock DCP"
OURS_DCP_FROM_STOCK = "holdfast.dcp, files of stock DCP"

COLD_PROBES = (*DIRECT_READS, BUFFERED_READ)


RIVALS = {
    **dict.fromkeys(STOCK_VARIANTS, "options of stock DCP"),
    **dict.fromkeys((*PEERS, *LOADING_PEERS), "peers"),
    **dict.fromkeys((*DIRECT_WRITES, *COLD_PROBES), "probes"),
}
"""Of these, rows name only the best."""


def measure_transformer(suite: Suite) -> None:
    """Everybody, against everything that the hardware can do."""
    run = _Run(suite, "transformer")
    run.save((OURS, OURS_DCP, STOCK, *STOCK_VARIANTS, *PEERS), share=0.22, with_probes=True)
    run.keep_only((OURS, STOCK, *PEERS))
    run.load_cold((OURS, STOCK, *LOADING_PEERS), share=0.18)
    run.verify(share=0.03)
    run.load_warm((OURS, OURS_FROM_STOCK, OURS_DCP_FROM_STOCK, STOCK, *LOADING_PEERS), share=0.11)
    run.remove()


def measure_small_tensors(suite: Suite) -> None:
    """Where only the work per tensor counts."""
    run = _Run(suite, "small tensors")
    slow = () if suite.scale.slow_peers else SLOW_PEERS
    savers = [name for name in PEERS if name not in slow]
    loaders = [name for name in LOADING_PEERS if name not in (*slow, MAPPED_LOAD)]
    run.save((OURS, OURS_DCP, STOCK, *savers), share=0.08, with_probes=False)
    run.load_warm((OURS, OURS_DCP_FROM_STOCK, STOCK, *loaders), share=0.1, with_probes=False)
    run.remove()


def measure_huge_tensor(suite: Suite) -> None:
    """Where only the bytes count."""
    run = _Run(suite, "huge tensor", has_targets=False)
    run.save((OURS, OURS_DCP, STOCK), share=0.03, with_probes=True)
    run.load_warm((OURS, OURS_DCP_FROM_STOCK, STOCK), share=0.02)
    run.remove()


@dataclass(frozen=True)
class _Way:
    """Which contender loads, and whose checkpoint."""

    contender: str
    written_by: str


_LOADS_OF_OTHERS = {
    OURS_FROM_STOCK: _Way(OURS, STOCK),
    OURS_DCP_FROM_STOCK: _Way(OURS_DCP, STOCK),
    PLAIN_LOAD: _Way("torch.save", "torch.save"),
    MAPPED_LOAD: _Way(MAPPED_LOAD, "torch.save"),
}


class _Run:
    """One state: first saved by everybody, then loaded from what they saved last."""

    def __init__(self, suite: Suite, workload: str, *, has_targets: bool = True) -> None:
        self._suite = suite
        self._name = workload
        self._has_targets = has_targets
        shapes = WORKLOADS[workload](suite.scale)
        self._state = filled(shapes)
        self._place = room_for(shapes)
        self._nbytes = bytes_of(self._state)
        self._contenders: dict[str, Contender] = {}
        self._failed: dict[str, str] = {}
        self._saved: set[str] = set()
        self._probe_file = suite.place(f"{workload} probe") / "data"

    def save(self, names: Sequence[str], *, share: float, with_probes: bool) -> None:
        """Each save goes to a new folder. The one before it is removed outside of the measured time."""
        turns = []
        for name in self._able(names):
            folder = self._folder(name)
            turns.append(
                Turn(
                    name,
                    timed=_bound(self._contenders[name].save, self._state, folder),
                    before=_bound(remove, folder),
                    after=_bound(self._saved.add, name),
                    rivals=RIVALS.get(name, ""),
                )
            )
        if with_probes:
            turns += self._write_probes()
        self._measure("save", "durable save", names, turns, share)

    def load_cold(self, names: Sequence[str], *, share: float) -> None:
        """From the disk: nothing of the files is in memory."""
        turns = [self._load_turn(name, page_cache.drop) for name in self._loadable(names)]
        file, place = self._probe_file, self._place
        for name, readers in DIRECT_READS.items():
            turns.append(_probe(name, _bound(probes.read_directly, file, readers), _bound(page_cache.drop, file)))
        buffered = _bound(probes.read_buffered, file, place, 4)
        turns.append(_probe(BUFFERED_READ, buffered, _bound(page_cache.drop, file)))
        self._measure("cold", "load from the disk", names, turns, share)

    def verify(self, *, share: float) -> None:
        """All digests compared with what is on the disk."""
        folder, file = self._folder(OURS), self._probe_file
        turns = (
            [Turn(OURS, _bound(holdfast.verify, folder), _bound(page_cache.drop, folder))]
            if OURS in self._saved
            else []
        )
        for name, readers in DIRECT_READS.items():
            turns.append(_probe(name, _bound(probes.read_directly, file, readers), _bound(page_cache.drop, file)))
        self._measure("verify", "verify from the disk", (OURS,), turns, share)

    def load_warm(self, names: Sequence[str], *, share: float, with_probes: bool = True) -> None:
        """From the page cache, into which everything is read before."""
        turns = [self._load_turn(name, page_cache.fill) for name in self._loadable(names)]
        if with_probes:
            file, place = self._probe_file, self._place
            cached = _bound(probes.read_buffered, file, place, READERS)
            turns.append(_probe(CACHED_READ, cached, _bound(page_cache.fill, file)))
            turns.append(_probe(MEMORY_COPY, _bound(probes.copy_memory, self._state, place)))
        self._measure("warm", "load from the page cache", names, turns, share)

    def keep_only(self, names: Sequence[str]) -> None:
        """Free the disk of what nobody loads."""
        for name in self._saved - set(names):
            remove(self._folder(name))

    def remove(self) -> None:
        """Free the disk of everything."""
        self.keep_only(())
        remove(self._probe_file.parent)

    def _measure(self, key: str, title: str, names: Sequence[str], turns: list[Turn], share: float) -> None:
        self._suite.log(f"{self._name}: {title}")
        allowance = self._suite.allowance(share, has_target=self._has_targets)
        result = measure(f"{self._name}: {title}", self._nbytes, turns, allowance)
        for name in names:
            if name not in result.samples:
                result.failed[name] = self._failed.get(_way(name).contender) or "failed: no checkpoint to load"
        self._suite.measures[f"{self._name} {key}"] = result

    def _write_probes(self) -> list[Turn]:
        file = self._probe_file

        def begin_anew() -> None:
            remove(file.parent)
            file.parent.mkdir()

        direct = [
            _probe(name, _bound(probes.write_directly, file, self._nbytes, writers), begin_anew)
            for name, writers in DIRECT_WRITES.items()
        ]
        return [*direct, _probe(CACHED_WRITE, _bound(probes.write_cached, file, self._nbytes), begin_anew)]

    def _load_turn(self, name: str, prepare: Callable[[Path], None]) -> Turn:
        way = _way(name)
        folder = self._folder(way.written_by)
        checked = False

        def before() -> None:
            if not checked:
                wipe(self._place)
            prepare(folder)

        def after() -> None:
            nonlocal checked
            if not checked and (key := differing_key(self._state, self._place)) is not None:
                raise AssertionError(f"{key} was not loaded as it was saved")
            checked = True

        load = _bound(self._contenders[way.contender].load, self._place, folder)
        return Turn(name, load, before, after, RIVALS.get(name, ""))

    def _loadable(self, names: Sequence[str]) -> list[str]:
        able = set(self._able(tuple(_way(name).contender for name in names)))
        return [name for name in names if _way(name).contender in able and _way(name).written_by in self._saved]

    def _able(self, names: Sequence[str]) -> list[str]:
        """Those that are installed, and have saved and loaded a few bytes: first calls take longer."""
        for name in dict.fromkeys(names):
            if name not in self._contenders and name not in self._failed:
                reason = why_missing(name) or self._try_out(name)
                if reason is not None:
                    self._failed[name] = reason
        return [name for name in dict.fromkeys(names) if name in self._contenders]

    def _try_out(self, name: str) -> str | None:
        folder = self._suite.place("first call")
        try:
            contender = MAKERS[name]()
            state = few_bytes()
            place = room_for(shapes_of(state))
            contender.save(state, folder)
            contender.load(place, folder)
        except Exception as error:
            return f"failed: {one_line(error)}"
        finally:
            remove(folder)
        self._contenders[name] = contender
        return None

    def _folder(self, name: str) -> Path:
        return self._suite.place(f"{self._name} {name}")


def _way(name: str) -> _Way:
    return _LOADS_OF_OTHERS.get(name, _Way(name, name))


def _probe(name: str, timed: Callable[[], None], before: Callable[[], None] = nothing) -> Turn:
    return Turn(name, timed, before, rivals=RIVALS.get(name, ""))


def _bound(function: Callable[..., object], *arguments: object) -> Callable[[], None]:
    def call() -> None:
        function(*arguments)

    return call
