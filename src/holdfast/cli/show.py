"""``holdfast show``: what is in a checkpoint, down to single elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.app import Example, command
from holdfast.cli.console import reply
from holdfast.cli.options import AllowPickle, Json, Memory, Place

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpoint
    from holdfast.sources.stored_nodes import StoredNode

_MOST_ELEMENTS = 1000
"""A tensor of more is shortened, unless all of it, or a part of it, was asked for."""

_LONGEST_LINE = 80
"""Of elements that are shown beside the name of a tensor."""


@command(
    "show",
    examples=[
        Example("holdfast show runs/a/step-00000300", "the tree, with shapes, dtypes, sizes and where tensors lie"),
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
            metavar="PATTERN",
            help="Only keys that match, such as 'model.*'. May be given several times.",
            show_default=False,
        ),
    ] = None,
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
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: keys, shapes, dtypes, sizes, and the elements themselves.

    Only what is shown is read: the tree of a checkpoint of any size is there at once, and a slice of a tensor takes the
    blocks that it lies in. Layers that look the same are put together.
    """
    from holdfast.checkpoint import open_checkpoint

    with open_checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        if part is not None:
            _show_part(checkpoint, part, statistics=statistics, everything=everything, as_json=as_json)
            return
        _show_tree(
            checkpoint,
            key,
            depth,
            values=values,
            statistics=statistics,
            everything=everything,
            memory=memory,
            as_json=as_json,
        )


def _show_part(checkpoint: Checkpoint, text: str, *, statistics: bool, everything: bool, as_json: bool) -> None:
    """One tensor, a part of one, or a value."""
    from holdfast.inspecting.elements import Excerpt, elements_of, in_words, plain_elements
    from holdfast.inspecting.key_slices import parse_key_slice
    from holdfast.tensor_handles import TensorHandle

    name, index = parse_key_slice(text, checkpoint)
    found = checkpoint[name]
    if not isinstance(found, TensorHandle):
        if index is not None:
            raise typer.BadParameter(f"{name!r} is a value and no tensor, so it has no such part", param_hint="KEY")
        reply({"key": name, "value": found}, f"{name}: {found!r}", as_json=as_json)
        return
    elements = elements_of(found, index, limit=None if everything else _MOST_ELEMENTS)
    answer: dict[str, Any] = {
        "key": name,
        "dtype": str(found.dtype),
        "shape": list(found.shape),
        "part": None if index is None else text[len(name) :].strip(),
        "chunks": [chunk._asdict() for chunk in checkpoint.layout(name)],
    }
    lines = [f"{name}: {found.dtype} {list(found.shape)}"]
    if statistics:
        counted = checkpoint.statistics(name)
        answer["statistics"] = counted.to_json()
        lines.append(str(counted))
    answer["elements"] = None if isinstance(elements, Excerpt) else plain_elements(elements)
    lines.append(in_words(elements, everything=everything))
    reply(answer, "\n".join(lines), as_json=as_json)


def _show_tree(
    checkpoint: Checkpoint,
    patterns: list[str] | None,
    depth: int | None,
    *,
    values: bool,
    statistics: bool,
    everything: bool,
    memory: int | None,
    as_json: bool,
) -> None:
    from holdfast.inspecting.drawing import Drawing, summed
    from holdfast.inspecting.numbers import are_numbers
    from holdfast.inspecting.statistics import count
    from holdfast.inspecting.tree import tree_of
    from holdfast.progress import size

    leaves = checkpoint.leaves(patterns)
    refs = {leaf.value.key: leaf.value for leaf in leaves if _is_tensor(leaf)}
    counted: dict[str, Any] = {}
    if statistics:
        numbers = [ref for ref in refs.values() if are_numbers(ref)]
        counted = {key: own.result() for key, own in count(checkpoint.source, numbers, memory_budget=memory).items()}
    if as_json:
        reply(_tree_as_json(checkpoint, leaves, counted), "", as_json=True)
        return

    def remark(ref: Any) -> str:
        from holdfast.inspecting.elements import elements_of, in_words
        from holdfast.tensor_handles import TensorHandle

        words = [str(counted[ref.key])] if ref.key in counted else []
        if values:
            shown = elements_of(TensorHandle(checkpoint.source, ref), limit=12)
            text = " ".join(in_words(shown, everything=False).split())
            words.append(text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…")
        return "  ".join(words)

    root = tree_of(leaves)
    drawing = Drawing(checkpoint, depth=depth, everything=everything, remark=remark if values or statistics else None)
    headline = f"{checkpoint.path} ({checkpoint.format}): {summed(root) or 'nothing'}, {size(root.nbytes)}"
    reply({}, f"{headline}\n{drawing.text(root)}", as_json=False)


def _is_tensor(leaf: StoredNode) -> bool:
    from holdfast.formats.native.refs import TensorRef

    return isinstance(leaf.value, TensorRef)


def _tree_as_json(checkpoint: Checkpoint, leaves: list[StoredNode], counted: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for leaf in leaves:
        if not _is_tensor(leaf):
            values[leaf.key] = leaf.value
            continue
        ref = leaf.value
        tensors[leaf.key] = {
            "dtype": str(ref.dtype),
            "shape": list(ref.shape),
            "bytes": ref.nbytes,
            "kind": ref.kind,
            **({} if ref.key == leaf.key else {"same_as": ref.key}),
            **({"statistics": counted[ref.key].to_json()} if ref.key in counted else {}),
        }
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "identity": checkpoint.source.identity,
        "tensors": tensors,
        "values": values,
    }
