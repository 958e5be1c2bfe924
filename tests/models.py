"""Models to save and load, and the ways to spread one over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.sharding import mesh_of_all_ranks


class Net(nn.Module):
    """Two layers, a norm and a buffer that counts. Choose sizes that do not divide evenly by ranks."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)
        self.norm = nn.LayerNorm(outputs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.norm(self.down(torch.relu(self.up(x))))


class Tied(nn.Module):
    """An embedding and a head that share their weight, unless told otherwise."""

    def __init__(self, tokens: int = 5, width: int = 3, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.head = nn.Linear(width, tokens, bias=False)
        if tie:
            self.head.weight = self.embed.weight


# --- the ways to spread a model with layers ``up`` and ``down`` -------------------------------------------------------


def plain(net: nn.Module) -> nn.Module:
    return net


def ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp1(net: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"), **options)


def fsdp2(net: Any) -> nn.Module:
    mesh = mesh_of_all_ranks()
    fully_shard(net.up, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hsdp(net: nn.Module) -> nn.Module:
    shape = (2, dist.get_world_size() // 2)
    return fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")))


def tensor_parallel(net: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    return parallelize_module(net, mesh or mesh_of_all_ranks(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp2_over_tensor_parallel(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    return fully_shard(tensor_parallel(net, mesh["tp"]), mesh=mesh["fsdp"])
