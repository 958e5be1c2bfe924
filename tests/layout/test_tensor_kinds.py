"""Tensors that are spread over ranks are known as such, and nobody else pays for importing them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import torch
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from holdfast._layout.tensor_kinds import is_dtensor, is_sharded_tensor
from tests.rank_pool import RankPool


def kinds() -> list[tuple[bool, bool]]:
    mesh = init_device_mesh("cpu", (1,))
    sharded = init_from_local_shards([Shard.from_tensor_and_offsets(torch.ones(2), [0], 0)], 2)
    values = [distribute_tensor(torch.ones(2), mesh, [Replicate()]), sharded, torch.ones(2), 3]
    return [(is_dtensor(value), is_sharded_tensor(value)) for value in values]


def test_kinds_are_told_apart(ranks: RankPool):
    assert ranks(1).run(kinds) == [[(True, False), (False, True), (False, False), (False, False)]]


def test_a_save_of_plain_tensors_and_models_imports_nothing_for_distributed_ones(tmp_path):
    program = f"""
        import sys, torch
        import holdfast
        state = {{"w": torch.ones(3), "model": torch.nn.Linear(2, 2), "cast": torch.ones(2)}}
        holdfast.save(state, {str(tmp_path / "x")!r}, cast={{"cast": "bfloat16"}})
        print([name for name in ("torch.distributed.tensor", "torch._dynamo", "sympy") if name in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
