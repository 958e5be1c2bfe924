"""Whether chunks tile a tensor: what is outside of it, what overlaps and what is left open, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast._base.boxes import Box, BoxLike, Overlap, first_overlap, out_of_bounds, uncovered, volume
from holdfast._base.texts import listed
from holdfast.errors import InvalidPlanError


def described(box: BoxLike) -> str:
    """A chunk in words.

    >>> described(Box((4, 0), (2, 3)))
    '[offsets [4, 0], sizes [2, 3]]'
    """
    return f"[offsets {list(box.offsets)}, sizes {list(box.sizes)}]"


def tiling_problems(
    chunks: Sequence[BoxLike],
    shape: Sequence[int],
    *,
    may_have_gaps: bool = False,
    name: Callable[[int], str] | None = None,
) -> list[str]:
    """Why chunks do not tile a tensor of this shape; nothing if they do.

    ``name`` describes a chunk, given its position, if there is something better than its place.

    >>> tiling_problems([Box((0,), (2,)), Box((3,), (1,))], (4,))
    ['3 of its 4 elements are in the chunks, and no chunk covers the region at offsets [2] of sizes [1]']
    """
    if len(chunks) == 1 and tuple(chunks[0].sizes) == tuple(shape) and not any(chunks[0].offsets):
        return []  # nearly all tensors are whole
    name = name or (lambda position: described(chunks[position]))
    outside = out_of_bounds(chunks, shape)
    problems = [f"chunk {name(position)} is outside of a tensor of shape {list(shape)}" for position in outside]
    comparable: Sequence[int] = range(len(chunks))
    if outside:  # perhaps because it has another number of dimensions
        comparable = [at for at in comparable if len(chunks[at].offsets) == len(chunks[at].sizes) == len(shape)]
    pair = first_overlap([chunks[at] for at in comparable] if outside else chunks)
    if pair is not None:
        one, other = (name(comparable[position]) for position in pair)
        problems.append(f"chunks {one} and {other} overlap")
    if not problems and not may_have_gaps:
        elements, stored = volume(shape), sum(volume(chunk.sizes) for chunk in chunks)
        if stored != elements:
            gap = _gap(Box((0,) * len(shape), tuple(shape)), chunks)
            problems.append(f"{stored} of its {elements} elements are in the chunks, and {gap}")
    return problems


def refuse_bad_tiling(problems: Sequence[str], headline: str) -> None:
    """Raise if there are problems, which begin with the keys of their tensors."""
    if problems:
        raise InvalidPlanError(
            "\n".join(
                [headline, *listed(problems), "Save with all ranks that hold parts of a tensor. Nothing was saved."]
            ),
            problems=problems,
        )


def missing_part(
    targets: Sequence[BoxLike], chunks: Sequence[BoxLike], shape: Sequence[int], shared: Sequence[Overlap]
) -> str | None:
    """A part of the targets, boxes of a stored tensor, that none of its chunks covers; None if all is covered.

    ``shared`` is what targets and chunks have in common (see ``boxes.overlaps``).
    """
    touching: list[list[BoxLike]] = [[] for _ in targets]
    for found in shared:
        touching[found.target].append(chunks[found.source])
    gap = next(filter(None, map(_gap, targets, touching)), None)
    if gap is None:
        return None
    return (
        f"{gap} (the checkpoint has {len(chunks)} chunk(s) of a tensor of shape {list(shape)}). The checkpoint is "
        "incomplete: load another one, or all ranks' files of it."
    )


def _gap(target: BoxLike, pieces: Sequence[BoxLike]) -> str | None:
    hole = uncovered(target, pieces)
    if hole is None:
        return None
    return f"no chunk covers the region at offsets {list(hole.offsets)} of sizes {list(hole.sizes)}"
