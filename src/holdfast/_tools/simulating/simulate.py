"""Plans a save for very many ranks as one of them, and as the root of the tree of ranks, with the code of real saves.

No process but this one takes part, and no tensor is made. A state is described by shapes and rules, as a rank describes
the tensors that it has; all that follows is what ``holdfast.save`` does until the first byte is written.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._base.divisions import Numbers
from holdfast._formats.native.layout import lay_out
from holdfast._formats.native.names import data_file, new_generation
from holdfast._formats.native.record import Record, decode_record, encode_record
from holdfast._formats.native.stored_files import StoredFile, TablePlace
from holdfast._formats.native.stored_parts import places_of
from holdfast._formats.native.values import Encoder
from holdfast._ranks.meeting import LinkedCollectives
from holdfast._save.capture import Captured
from holdfast._save.options import CheckedOptions
from holdfast._save.planning import AgreedSave, WritePlan, known_plan, plan_save
from holdfast._stores.memory_store import MemoryStore
from holdfast._tools.simulating.layouts import (
    GROUPED,
    ITEMSIZE,
    LAYOUTS,
    Rule,
    Shape,
    bytes_of,
    described,
    held_bytes,
    shapes_of,
)
from holdfast._tools.simulating.links import SimulatedLink, Work


class Machines(NamedTuple):
    """What ranks run on. Speeds are in bytes per second and machine."""

    ranks_each: int
    disk_speed: int
    network_speed: int


def simulate(ranks: int, tensors: int, layout: str, *, group: int, nbytes: int, machines: Machines) -> dict[str, Any]:
    """What one save costs the root and one other rank, and how long a save and a load would take about."""
    if layout in GROUPED and ranks % group:
        raise ValueError(f"{ranks} ranks do not make groups of {group}; give a --group that divides them")
    if ranks < 2:
        raise ValueError(f"{ranks} is not a number of ranks that have to agree; give --ranks 2 or more")
    shapes = shapes_of(tensors, nbytes)
    rule = LAYOUTS[layout](ranks, group)
    tree = _tree(shapes)
    root = _Simulated(0, ranks, shapes, rule, tree)
    answers = root.plan_twice([])
    other = _Simulated(ranks // 2 | 1 if ranks > 2 else 1, ranks, shapes, rule, tree)  # which leads nobody
    other.plan_twice(answers)
    written = root.written_by_each()
    here = min(machines.ranks_each, ranks)
    exchanged = root.later.bytes_in + root.later.bytes_out
    return {
        "ranks": ranks,
        "tensors": tensors,
        "layout": layout,
        "group": group if layout in GROUPED else None,
        "bytes": bytes_of(shapes),
        "root": root.found(),
        "rank": other.found(),
        "busiest_rank_bytes": int(written.max()),
        "files": int(np.count_nonzero(written)),
        "record": root.record(written),
        "peak_memory_bytes": _peak_memory(),
        "machine": {"ranks": here, "disk_speed": machines.disk_speed, "network_speed": machines.network_speed},
        "estimated_seconds": {
            "save": max(root.later.cpu, other.later.cpu)
            + exchanged / machines.network_speed
            + int(written.max()) * here / machines.disk_speed,
            "load": max(root.held, other.held) * here / machines.disk_speed,
        },
    }


def _tree(shapes: list[Shape]) -> Any:
    """The values of a state with these tensors, as a save encodes them."""
    encoder = Encoder(lambda *_: None, allow_pickle=False)
    nothing = torch.zeros(0)
    return encoder.encode({shape.key: nothing for shape in shapes})


class _Simulated:
    """One rank, and what it did."""

    def __init__(self, rank: int, ranks: int, shapes: list[Shape], rule: Rule, tree: Any) -> None:
        self.rank, self.ranks = rank, ranks
        descriptions = described(shapes, rule, rank, ranks)
        self.captured = Captured(tree, {}, descriptions, {})
        self.held = held_bytes(descriptions)
        self.first, self.later = Work(), Work()
        self.written = self.files = self.connections = 0
        self.decision: AgreedSave | None = None

    def plan_twice(self, answers: list[bytes]) -> list[bytes]:
        """The first save of a state, and a later one. Returns what the root has answered."""
        known_plan.cache_clear()
        for work in (self.first, self.later):
            link = SimulatedLink(self.rank, self.ranks, work, answers=answers if self.rank else None)
            with work.counted():
                plan = self._plan(link)
        self.connections = link.connections
        self.written = sum(chunk.nbytes for chunk in plan.chunks)
        self.files = len(lay_out(plan.chunks, plan.generation))
        self.decision = plan.decision
        return link.answers

    def written_by_each(self) -> Numbers:
        """The bytes that every rank writes, as the root knows it."""
        assert self.decision is not None, "only the root knows it"
        assert self.decision.shared is not None, "all ranks have the same"
        written = np.zeros(self.ranks, np.int64)
        tensors, parts = self.decision.shared.tensors, self.decision.shared.parts
        shapes = tensors.each([like.shape for like in tensors.likes])
        for (shape, (division, first)), count in Counter(zip(shapes, parts, strict=True)).items():
            sizes = division.boxes(shape)[1].prod(axis=1) * count
            np.add.at(written, division.ranks_with(first=first, world_size=self.ranks)[:, 0], sizes * ITEMSIZE)
        return written

    def record(self, written: Numbers) -> dict[str, Any]:
        """The record that the root puts in place, whose files have about these sizes, and what reading it takes."""
        assert self.decision is not None, "only the root knows it"
        contents = self.decision.contents([])
        generation = new_generation()
        table_bytes, last = 1 << 16, len(contents.tensors) - 1
        files = [
            StoredFile(
                data_file(generation, rank, 0),
                nbytes + table_bytes,
                rank=rank,
                table=TablePlace(nbytes, table_bytes, f"{nbytes:032x}", 0, last),
            )
            for rank, nbytes in enumerate(written.tolist())
            if nbytes
        ]
        began = time.process_time()
        encoded = encode_record(
            Record(
                generation,
                files,
                None,
                contents.tensors,
                contents.tree,
                world_size=self.ranks,
                places=places_of(contents.parts),
            )
        )
        made = time.process_time()
        decode_record(encoded, "holdfast.json")
        return {
            "bytes": len(encoded),
            "write_cpu": made - began,
            "read_cpu": time.process_time() - made,
        }

    def _plan(self, link: SimulatedLink) -> WritePlan:
        store = MemoryStore(f"simulated-{id(self)}")
        return plan_save(store, LinkedCollectives(link), CheckedOptions.of(), self.captured)

    def found(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "number": self.rank,
            "first_plan_cpu": self.first.cpu,
            "later_plan_cpu": self.later.cpu,
            "message_bytes_in": self.later.bytes_in,
            "message_bytes_out": self.later.bytes_out,
            "connections": self.connections,
            "bytes_held": self.held,
            "bytes_written": self.written,
            "files": self.files,
        }


def _peak_memory() -> int:
    """Of this process so far, with all that it has imported."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
