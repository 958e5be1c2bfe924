"""One checkpoint in numbers: what it is, who saved it, how much of what is in it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from holdfast._base.arguments import Size, checked_budget
from holdfast._base.patterns import dotted
from holdfast._base.provenance import optimizers_noted
from holdfast._base.texts import some_of
from holdfast._formats.native.record import REPAIRED, repairs_in
from holdfast._formats.native.refs import TensorRef
from holdfast._load.checkpoint import Checkpoint, source_of
from holdfast._tools.inspecting.numbers import are_numbers
from holdfast._tools.inspecting.statistics import count
from holdfast._watching.progress import OnProgress, size

_MOST_SHOWN = 20

_IN_ROWS_OF_THEIR_OWN = ("phases", "phase_ranks", "optimizers", REPAIRED)


@dataclass(frozen=True)
class PartSummary:
    """All that is below one name at the top."""

    tensors: int
    elements: int
    nbytes: int
    values: int

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        return {"tensors": self.tensors, "elements": self.elements, "bytes": self.nbytes, "values": self.values}


@dataclass(frozen=True)
class CheckpointSummary:
    """What there is to say about a checkpoint in a few lines."""

    path: str
    format: str
    identity: str
    written: Mapping[str, Any]
    metadata: Mapping[str, Any]
    files: int
    bytes_on_disk: int
    keys: int
    tensors: int
    elements: int
    tensor_bytes: int
    dtypes: Mapping[str, int]
    """How many elements there are of each type."""
    kinds: Mapping[str, int]
    """How many tensors are sharded, replicated, or of a rank each."""
    parts: Mapping[str, PartSummary]
    not_finite: Mapping[str, tuple[int, int]] | None = field(default=None)
    """Tensors with nan or infinite elements, and how many of each; None if nobody looked."""

    @property
    def ok(self) -> bool:
        """Whether no element is known to be nan or infinite."""
        return not self.not_finite

    def __str__(self) -> str:
        lines = [
            f"{self.path}",
            *_rows({"format": self.format, "identity": self.identity}),
            *_rows({name: value for name, value in self.written.items() if name not in _IN_ROWS_OF_THEIR_OWN}),
            *_rows({"optimizers": some_of([": ".join(pair) for pair in optimizers_noted(self.written).items()])}),
            *(row for repair in repairs_in(self.written) for row in _rows({REPAIRED: str(repair)})),
            *_rows(
                {
                    "files": f"{self.files:,}, {size(self.bytes_on_disk)} on disk",
                    "keys": f"{self.keys:,}, of which {self.tensors:,} tensors",
                    "elements": f"{self.elements:,}, {size(self.tensor_bytes)}",
                    "dtypes": ", ".join(f"{name} ({number:,})" for name, number in self.dtypes.items()),
                    "kinds": ", ".join(f"{name} ({number:,})" for name, number in self.kinds.items()),
                }
            ),
        ]
        lines += _listed("parts", {name: _part_in_words(part) for name, part in self.parts.items()})
        lines += _listed("metadata", self.metadata)
        phases = self.written.get("phases")
        if isinstance(phases, Mapping):
            lines += _listed(
                "seconds by rank", {name: _seconds(times, self._ranks()) for name, times in phases.items()}
            )
        if self.not_finite is not None:
            bad = {key: f"{nan:,} nan, {inf:,} inf" for key, (nan, inf) in self.not_finite.items()}
            lines += _listed("NOT FINITE", bad) or ["  all elements are finite"]
        return "\n".join(lines)

    def _ranks(self) -> Sequence[int] | None:
        """Of which ranks it is known how long they took, if not of all."""
        found = self.written.get("phase_ranks")
        return found if isinstance(found, list) else None

    def to_json(self) -> dict[str, Any]:
        """All fields as plain data."""
        finite = None if self.not_finite is None else {key: list(pair) for key, pair in self.not_finite.items()}
        parts = {name: part.to_json() for name, part in self.parts.items()}
        return {**vars(self), "ok": self.ok, "parts": parts, "not_finite": finite}


def summarize(
    checkpoint: Checkpoint,
    *,
    finite: bool = False,
    memory_budget: Size | None = None,
    on_progress: OnProgress | None = None,
) -> CheckpointSummary:
    """Put together what is known. With ``finite`` all tensors are read, to look for nan and infinities.

    >>> import tempfile, torch
    >>> import holdfast
    >>> path = tempfile.mkdtemp() + "/step-100"
    >>> saved = holdfast.save({"model": {"w": torch.tensor([1.0, float("nan")])}, "step": 100}, path)
    >>> found = summarize(holdfast.open(path), finite=True)
    >>> found.tensors, found.parts["model"].elements, found.not_finite
    (1, 2, {'model.w': (1, 0)})
    """
    checked_budget(memory_budget)
    source = source_of(checkpoint)
    refs = list(source.tensors.values())
    files = source.files()
    found: dict[str, tuple[int, int]] | None = None
    if finite:
        numbers = [ref for ref in refs if are_numbers(ref)]
        counts = count(source, numbers, memory_budget=memory_budget, on_progress=on_progress)
        found = {key: (own.nan, own.inf) for key, own in counts.items() if own.nan or own.inf}
    dtypes: Counter[str] = Counter()
    for ref in refs:
        dtypes[str(ref.dtype)] += prod(ref.shape)
    return CheckpointSummary(
        path=checkpoint.path,
        format=checkpoint.format,
        identity=source.identity,
        written=checkpoint.provenance,
        metadata=checkpoint.metadata,
        files=len(files),
        bytes_on_disk=sum(nbytes for _, nbytes in files),
        keys=len(checkpoint),
        tensors=len(refs),
        elements=sum(dtypes.values()),
        tensor_bytes=sum(ref.nbytes for ref in refs),
        dtypes=dict(dtypes.most_common()),
        kinds=dict(Counter(ref.kind for ref in refs).most_common()),
        parts=_parts(checkpoint),
        not_finite=found,
    )


def _parts(checkpoint: Checkpoint) -> dict[str, PartSummary]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    seen: set[str] = set()
    for leaf in checkpoint.leaves():
        own = sums[dotted(leaf.key).partition(".")[0]]
        if not isinstance(leaf.value, TensorRef):
            own[3] += 1
        elif leaf.value.key not in seen:
            seen.add(leaf.value.key)
            own[0] += 1
            own[1] += prod(leaf.value.shape)
            own[2] += leaf.value.nbytes
    return {name: PartSummary(*numbers) for name, numbers in sums.items()}


def _part_in_words(part: PartSummary) -> str:
    tensors = f"{part.elements:,} elements in {part.tensors:,} tensors, {size(part.nbytes)}" if part.tensors else ""
    values = f"{part.values:,} value{'' if part.values == 1 else 's'}" if part.values else ""
    return ", ".join(filter(None, (tensors, values)))


def _rows(facts: Mapping[str, Any]) -> list[str]:
    return [f"  {name:<12} {value}" for name, value in facts.items() if value not in ("", None)]


def _listed(headline: str, facts: Mapping[str, Any]) -> list[str]:
    if not facts:
        return []
    shown = list(facts.items())[:_MOST_SHOWN]
    more = [f"    … and {len(facts) - _MOST_SHOWN:,} more"] if len(facts) > _MOST_SHOWN else []
    width = max(len(str(name)) for name, _ in shown)
    return [f"  {headline}:", *(f"    {name!s:<{width}}  {value}" for name, value in shown), *more]


def _seconds(times: Any, ranks: Sequence[int] | None = None) -> str:
    if not isinstance(times, (list, tuple)) or not all(isinstance(time, (int, float)) for time in times) or not times:
        return str(times)
    if len(times) == 1:
        return f"{times[0]:.3f}"
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    if ranks is not None and len(ranks) == len(times):
        return (
            f"{times[slowest]:.3f} (rank {ranks[slowest]}), {min(times):.3f} on the fastest of the {len(times)} slowest"
        )
    return f"{min(times):.3f} to {times[slowest]:.3f} (rank {slowest})"
