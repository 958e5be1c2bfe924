"""From a checkpoint of many processes to a single file that `torch.load` reads, and back.

    torchrun --nproc-per-node 2 examples/dcp/convert_formats.py [FOLDER]

The conversions are functions that one process calls. They are commands, too:

    python -m holdfast.dcp.format_utils dcp_to_torch FOLDER FILE
    python -m holdfast.dcp.format_utils torch_to_dcp FILE FOLDER

A single file can also be loaded without converting it: one process reads it and passes the tensors on to the others.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast.dcp as dcp
from holdfast.dcp.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from holdfast.dcp.state_dict import get_model_state_dict


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "convert-formats")
    sharded, file, converted = f"{folder}/sharded", f"{folder}/model.pt", f"{folder}/converted"
    mesh = join()

    original = shard(build(mesh, seed=1), mesh)
    dcp.save({"model": get_model_state_dict(original), "step": 5}, checkpoint_id=sharded)
    weights = {name: value.full_tensor() for name, value in original.state_dict().items()}

    if dist.get_rank() == 0:
        dcp_to_torch_save(sharded, file)
        torch_save_to_dcp(file, converted)
        state = torch.load(file)
        assert state["step"] == 5
        assert_same(weights, state["model"])
        print("torch.load reads the file: whole tensors, nested as they were saved")
    dist.barrier()  # nobody loads before the files are there

    model = shard(build(mesh, seed=2), mesh)
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=converted)
    assert_same(weights, {name: value.full_tensor() for name, value in model.state_dict().items()})
    if dist.get_rank() == 0:
        print("The file as a checkpoint again: loaded into a sharded model")

    model = build(mesh, seed=3)
    dcp.load(
        {"model": model.state_dict()},
        checkpoint_id=file,
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
    )
    assert_same(weights, model.state_dict())
    if dist.get_rank() == 0:
        print("The file itself: read by one process, loaded by all")
    dist.destroy_process_group()


def join() -> DeviceMesh:
    """Meet the other processes, on the accelerators if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return init_device_mesh(device.type, (dist.get_world_size(),))


def build(mesh, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(mesh.device_type)


def shard(model, mesh):
    return fully_shard(model, mesh=mesh)


def assert_same(expected, found):
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor.cpu(), found[name].cpu()), f"{name} is not what was saved"


if __name__ == "__main__":
    main()
