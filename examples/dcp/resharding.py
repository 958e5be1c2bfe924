"""Save in one parallel layout, load in others.

    torchrun --nproc-per-node 4 examples/dcp/resharding.py [FOLDER]

The model is saved under tensor parallelism combined with FSDP2, on a mesh of two dimensions. It is loaded under FSDP2
alone, and into columns that are dealt out by hand. A checkpoint holds tensors and where their parts are; `load` works
out which part of which file each process needs. The number of processes may change, too: see load_in_one_process.py.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast.dcp as dcp
from holdfast.dcp.state_dict import get_model_state_dict


def tensor_parallel_and_fsdp(device, seed):
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = build(device, seed)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return get_model_state_dict(model)


def fsdp(device, seed):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return get_model_state_dict(fully_shard(build(device, seed), mesh=mesh))


def columns(device, seed):
    """No model at all: any tensors with the names and shapes of the stored ones will do."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return {
        name: zeros(tensor.shape, device_mesh=mesh, placements=[Shard(1) if tensor.dim() == 2 else Replicate()])
        for name, tensor in build(device, seed).state_dict().items()
    }


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "resharding")
    device = join()

    original = build(device, seed=1).state_dict()
    saved = tensor_parallel_and_fsdp(device, seed=1)
    dcp.save({"model": saved}, checkpoint_id=folder)
    describe("saved", saved)

    for layout in (fsdp, columns):
        loaded = layout(device, seed=2)
        dcp.load({"model": loaded}, checkpoint_id=folder)
        for name, tensor in loaded.items():
            assert torch.equal(tensor.full_tensor(), original[name]), f"{name} changed on the way"
        describe("loaded", loaded)
    dist.destroy_process_group()


def describe(what, state):
    if dist.get_rank() == 0:
        weight = state["up.weight"]
        print(f"{what:6} up.weight on a mesh of {tuple(weight.device_mesh.shape)} as {weight.placements}")


def join() -> torch.device:
    """Meet the other processes; the device of this one is an accelerator if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return device


def build(device, seed):
    torch.manual_seed(seed)
    layers = {"up": nn.Linear(16, 64), "act": nn.Tanh(), "down": nn.Linear(64, 16)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model.to(device)


if __name__ == "__main__":
    main()
