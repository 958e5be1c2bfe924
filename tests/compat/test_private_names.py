"""Private names of torch are touched in ``holdfast._compat`` and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from holdfast._compat.sharded_tensors import ShardedTensor

SOURCES = Path(holdfast.__file__).parent
ELSEWHERE = {
    "dcp/state_dict.py": "hands on torch's helpers for models and optimizers, private ones too",
}
CLASSES = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage, DTensor, ShardedTensor, dist.ProcessGroup)
OBJECTS = (nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), torch.zeros(1))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def attributes_of_torch() -> set[str]:
    """The private attributes of the classes that Holdfast meets."""
    return {name for thing in (*CLASSES, *OBJECTS) for name in dir(thing) if is_private(name)}


def private_names_in(source: str) -> Iterator[tuple[int, str]]:
    """The lines that use a private name of torch, and which."""
    tree = ast.parse(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    of_torch = attributes_of_torch() - defined - own
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch")]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            owner = text.partition(".")[0]
            if owner in ("torch", "dist", "c10d") or (owner not in ("self", "cls") and node.attr in of_torch):
                yield node.lineno, text


def test_no_module_but_compat_uses_private_names_of_torch():
    paths = {str(path.relative_to(SOURCES)): path for path in SOURCES.rglob("*.py")}
    looked_at = [name for name in paths if not name.startswith("_compat/") and name not in ELSEWHERE]
    assert len(looked_at) > 200
    found = [f"{name}:{line}: {use}" for name in looked_at for line, use in private_names_in(paths[name].read_text())]
    assert not found, "move these into holdfast._compat:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "import torch._utils",
        "torch._neg_view(x)",
        "tensor._local_tensor",
        "module._modules",
    ],
)
def test_such_names_are_found(source: str):
    assert list(private_names_in(source))
