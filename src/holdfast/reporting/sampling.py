"""Which tensors of a checkpoint are described by statistics, and these as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import HoldfastError, UnsupportedTensorError
from holdfast.formats.native.refs import TensorRef
from holdfast.inspecting.statistics import statistics_of
from holdfast.patterns import Chooser, Patterns
from holdfast.progress import OnProgress
from holdfast.reporting.entries import Entry
from holdfast.reporting.packing import as_json_number
from holdfast.sources.source import Source

_MOST_TENSORS = 24
_BINS = 48
_MOST_BYTES = 256 << 20
"""What is read for statistics if nobody said which are wanted: a second, or two."""


def chosen_tensors(entries: Sequence[Entry], wanted: Patterns | bool | None) -> dict[int, TensorRef]:
    """The tensors to describe, by the number of their entry. Tied ones are described once."""
    refs: dict[str, tuple[int, TensorRef]] = {}
    is_meant = Chooser("*" if wanted is None or isinstance(wanted, bool) else wanted)
    for number, entry in enumerate(entries):
        ref = entry.ref
        if ref is not None and ref.nbytes and ref.key not in refs and wanted is not False and is_meant(entry.key):
            refs[ref.key] = (number, ref)
    found = dict(refs.values())
    return _largest(found) if wanted is None else found


def _largest(refs: Mapping[int, TensorRef]) -> dict[int, TensorRef]:
    chosen: dict[int, TensorRef] = {}
    left = _MOST_BYTES
    for number in sorted(refs, key=lambda number: (_is_of_an_optimizer(refs[number]), -refs[number].nbytes)):
        if refs[number].nbytes <= left and len(chosen) < _MOST_TENSORS:
            chosen[number] = refs[number]
            left -= refs[number].nbytes
    return chosen


def _is_of_an_optimizer(ref: TensorRef) -> bool:
    """Whether it looks like that. Such tensors are larger and less interesting than weights: they come after these."""
    return "optim" in ref.key.lower()


def statistics_facts(
    source: Source, chosen: Mapping[int, TensorRef], memory_budget: int | None, on_progress: OnProgress
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The statistics of chosen tensors, and why others could not be read, by the number of their entry."""
    found: dict[int, dict[str, Any]] = {}
    unread: dict[int, str] = {}
    total, done = sum(ref.nbytes for ref in chosen.values()), 0
    for number, ref in chosen.items():
        try:
            statistics = statistics_of(source, [ref], bins=_BINS, memory_budget=memory_budget)
        except UnsupportedTensorError:  # of a dtype that is not counted with
            continue
        except (HoldfastError, OSError) as error:  # the rest can still be shown
            unread[number] = str(error)
            continue
        finally:
            done += ref.nbytes
            on_progress(done, total)
        found[number] = {
            "count": statistics.count,
            "finite": statistics.finite,
            "nan": statistics.nan,
            "inf": statistics.inf,
            "zeros": statistics.zeros,
            **{
                name: as_json_number(getattr(statistics, name))
                for name in ("minimum", "maximum", "mean", "std", "norm")
            },
            "counts": list(statistics.histogram),  # empty if there is nothing to draw
        }
    return found, unread
