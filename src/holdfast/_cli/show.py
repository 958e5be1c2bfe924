"""``holdfast show``: what is in a checkpoint, down to single elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from holdfast._cli.app import Example, command
from holdfast._cli.console import progress, reply
from holdfast._cli.options import AllowPickle, Exclude, Json, Memory, Place, Quiet

if TYPE_CHECKING:
    from holdfast._load.checkpoint import Checkpoint
    from holdfast._load.stored_nodes import StoredNode
    from holdfast._tools.inspecting.statistics import Statistics

_MOST_ELEMENTS = 1000
"""A tensor of more is shortened, unless all of it, or a part of it, was asked for."""

_LONGEST_LINE = 80
"""Of elements that are shown beside the name of a tensor."""


@command(
    "show",
    examples=[
        Example("holdfast show runs/a/step-00000300", "the tree, with shapes, dtypes, sizes and places of tensors"),
        Example("holdfast show hf-model --key '*.weight' --statistics", "some of it, and what the numbers are like"),
        Example("holdfast show runs/a/step-00000300 'model.0.weight[0:4, :8]'", "elements of a tensor"),
        Example("holdfast show dcp step", "a value"),
        Example("holdfast show model.pt --depth 1", "sums for each part"),
    ],
)
def show(
    path: Place,
    part: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="One key, or a part of its tensor such as 'model.w[0:4, :8]'.", show_default=False
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            "-k",
            "--include",
            metavar="PATTERN",
            help="Only keys that match, such as 'model.*'. May be given several times.",
            show_default=False,
        ),
    ] = None,
    exclude: Exclude = None,
    values: Annotated[
        bool, typer.Option("--values", help="Show the elements of tensors, long ones shortened.")
    ] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", "-s", help="Read the tensors; show smallest, largest, mean, norm, nan.")
    ] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=1, help="How far down; all by default.", show_default=False)
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Show layers that look the same one by one, and elements without limit.")
    ] = False,
    memory: Memory = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: keys, shapes, dtypes, sizes, and the elements themselves.

    Only what is shown is read: the tree of a checkpoint of any size is there at once, and a slice of a tensor takes the
    blocks that it is stored in. Layers that look the same are put together.
    """
    from holdfast._load.checkpoint import open_checkpoint

    with open_checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        if part is not None:
            counting = _Counting(memory, quiet) if statistics else None
            _show_part(checkpoint, part, counting, everything=everything, as_json=as_json)
            return
        leaves = checkpoint.leaves(key, exclude=exclude)
        counted = _Counting(memory, quiet).each(checkpoint, leaves) if statistics else {}
        if as_json:
            reply(_tree_as_json(checkpoint, leaves, counted, values=values, everything=everything), "", as_json=True)
        else:
            text = _tree_as_text(checkpoint, leaves, counted, depth, values=values, everything=everything)
            reply({}, text, as_json=False)


class _Counting(NamedTuple):
    """How to read what is to be counted."""

    memory: int | None
    quiet: bool

    def one(self, checkpoint: Checkpoint, key: str) -> Statistics:
        """With a histogram, which takes reading it twice."""
        with progress("reading", quiet=self.quiet) as on_progress:
            return checkpoint.statistics(key, memory_budget=self.memory, on_progress=on_progress)

    def each(self, checkpoint: Checkpoint, leaves: list[StoredNode]) -> dict[str, Statistics]:
        """Of all tensors that are numbers, by their stored keys."""
        from holdfast._load.checkpoint import source_of
        from holdfast._tools.inspecting.numbers import are_numbers
        from holdfast._tools.inspecting.statistics import count

        refs = {leaf.value.key: leaf.value for leaf in leaves if _is_tensor(leaf)}
        numbers = [ref for ref in refs.values() if are_numbers(ref)]
        with progress("reading", quiet=self.quiet) as on_progress:
            found = count(source_of(checkpoint), numbers, memory_budget=self.memory, on_progress=on_progress)
        return {key: own.result() for key, own in found.items()}


def _show_part(
    checkpoint: Checkpoint, text: str, counting: _Counting | None, *, everything: bool, as_json: bool
) -> None:
    """One tensor, a part of one, or a value."""
    from holdfast._load.tensor_handles import TensorHandle
    from holdfast._tools.inspecting.elements import Excerpt, elements_of, in_words, parse_key_slice, plain_elements

    name, index = parse_key_slice(text, checkpoint)
    found = checkpoint[name]
    if not isinstance(found, TensorHandle):
        if index is not None:
            raise typer.BadParameter(f"{name!r} is a value, not a tensor, so it has no such part", param_hint="KEY")
        reply({"key": name, "value": found}, f"{name}: {found!r}", as_json=as_json)
        return
    try:
        elements = elements_of(found, index, limit=None if everything else _MOST_ELEMENTS)
    except IndexError as error:
        raise typer.BadParameter(f"{text}: {error} (the shape is {list(found.shape)})", param_hint="KEY") from None
    answer: dict[str, Any] = {
        "key": name,
        "dtype": str(found.dtype),
        "shape": list(found.shape),
        "part": None if index is None else text[len(name) :].strip(),
        "chunks": _chunks_as_json(checkpoint, name),
    }
    lines = [f"{name}: {found.dtype} {list(found.shape)}"]
    if counting is not None:
        counted = counting.one(checkpoint, name)
        answer["statistics"] = counted.to_json()
        lines.append(str(counted))
    answer["elements"] = None if isinstance(elements, Excerpt) else plain_elements(elements)
    lines.append(in_words(elements, everything=everything))
    reply(answer, "\n".join(lines), as_json=as_json)


def _tree_as_text(
    checkpoint: Checkpoint,
    leaves: list[StoredNode],
    counted: dict[str, Statistics],
    depth: int | None,
    *,
    values: bool,
    everything: bool,
) -> str:
    from holdfast._formats.native.record import repairs_in
    from holdfast._load.checkpoint import source_of
    from holdfast._tools.inspecting.tree import Drawing, summed, tree_of
    from holdfast._watching.progress import size

    def remark(ref: Any) -> str:
        from holdfast._load.tensor_handles import TensorHandle
        from holdfast._tools.inspecting.elements import elements_of, in_words

        words = [str(counted[ref.key])] if ref.key in counted else []
        if values:
            shown = elements_of(TensorHandle(source_of(checkpoint), ref), limit=12)
            text = " ".join(in_words(shown, everything=False).split())
            words.append(text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…")
        return "  ".join(words)

    root = tree_of(leaves)
    drawing = Drawing(checkpoint, depth=depth, everything=everything, remark=remark if values or counted else None)
    headline = f"{checkpoint.path} ({checkpoint.format}): {summed(root) or 'nothing'}, {size(root.nbytes)}"
    repaired = "".join(f"repaired: {repair}\n" for repair in repairs_in(checkpoint.provenance))
    return f"{headline}\n{repaired}{drawing.text(root)}"


def _is_tensor(leaf: StoredNode) -> bool:
    from holdfast._formats.native.refs import TensorRef

    return isinstance(leaf.value, TensorRef)


def _chunks_as_json(checkpoint: Checkpoint, key: str) -> list[dict[str, Any]]:
    return [
        {
            "offsets": list(chunk.offsets),
            "sizes": list(chunk.sizes),
            "file": chunk.file,
            "begin": chunk.begin,
            "bytes": chunk.nbytes,
            "rank": chunk.rank,
        }
        for chunk in checkpoint.layout(key)
    ]


def _tree_as_json(
    checkpoint: Checkpoint,
    leaves: list[StoredNode],
    counted: dict[str, Statistics],
    *,
    values: bool,
    everything: bool,
) -> dict[str, Any]:
    from holdfast._formats.native.record import repairs_in
    from holdfast._load.checkpoint import source_of
    from holdfast._load.tensor_handles import TensorHandle
    from holdfast._tools.inspecting.elements import Excerpt, elements_of, plain_elements
    from holdfast.errors import HoldfastError

    def elements_in(ref: Any) -> Any:
        found = elements_of(TensorHandle(source_of(checkpoint), ref), limit=None if everything else _MOST_ELEMENTS)
        return None if isinstance(found, Excerpt) else plain_elements(found)

    def chunks_of(key: str) -> Any:
        try:
            return _chunks_as_json(checkpoint, key)
        except HoldfastError:  # damaged, which the rest of the tree is not
            return None

    tensors: dict[str, Any] = {}
    plain_values: dict[str, Any] = {}
    for leaf in leaves:
        if not _is_tensor(leaf):
            plain_values[leaf.key] = leaf.value
            continue
        ref = leaf.value
        tensors[leaf.key] = {
            "dtype": str(ref.dtype),
            "shape": list(ref.shape),
            "bytes": ref.nbytes,
            "kind": ref.kind,
            "chunks": chunks_of(leaf.key),
            **({} if ref.key == leaf.key else {"same_as": ref.key}),
            **({"statistics": counted[ref.key].to_json()} if ref.key in counted else {}),
            **({"elements": elements_in(ref)} if values else {}),
        }
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "identity": source_of(checkpoint).identity,
        "repairs": [repair.to_json() for repair in repairs_in(checkpoint.provenance)],
        "tensors": tensors,
        "values": plain_values,
    }
