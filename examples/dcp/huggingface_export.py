"""Write a sharded model as a Hugging Face folder, and load such a folder into any sharding.

    torchrun --nproc-per-node 2 examples/dcp/huggingface_export.py [FOLDER]

Every process writes its shards as safetensors, then they become whole model files with an index, as the libraries of
Hugging Face expect them. The shards stay in the subfolder `sharded`. Such a folder holds tensors and nothing else.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, zeros

import holdfast.dcp as dcp
from holdfast.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.dcp.state_dict import get_model_state_dict

FILE_OF_EACH_TENSOR = {"0.weight": 1, "0.bias": 1, "2.weight": 2, "2.bias": 2}


def export(model, folder):
    writer = HuggingFaceStorageWriter(
        folder,
        fqn_to_index_mapping=FILE_OF_EACH_TENSOR,  # large models come in files of some gigabytes each
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)


def read_with_safetensors(folder):
    """As any program without torch.distributed does: the index names the file of each tensor."""
    with open(f"{folder}/model.safetensors.index.json") as index:
        files = set(json.load(index)["weight_map"].values())
    return {name: tensor for file in sorted(files) for name, tensor in load_file(f"{folder}/{file}").items()}


def load_columns(like, mesh, folder):
    """Matrices in columns, of which every process has some; each reads only the bytes that it needs."""
    state = {
        name: zeros(tensor.shape, device_mesh=mesh, placements=[Shard(1)])
        if tensor.dim() > 1
        else torch.zeros_like(tensor)
        for name, tensor in like.items()
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return state


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "huggingface-export")
    mesh = join()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(mesh.device_type)
    fully_shard(model, mesh=mesh)  # shards rows
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}

    export(model, folder)

    if dist.get_rank() == 0:
        assert_same(weights, read_with_safetensors(folder))
        print("safetensors reads", *sorted(file for file in os.listdir(folder) if file.endswith(".safetensors")))
    columns = load_columns(weights, mesh, folder)
    assert_same(weights, {name: whole(tensor) for name, tensor in columns.items()})
    if dist.get_rank() == 0:
        print(
            f"0.weight: saved in rows, loaded as {columns['0.weight'].placements} of {tuple(weights['0.weight'].shape)}"
        )
    dist.destroy_process_group()


def join() -> DeviceMesh:
    """Meet the other processes, on the accelerators if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return init_device_mesh(device.type, (dist.get_world_size(),))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(expected, found):
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor.cpu(), found[name].cpu()), f"{name} is not what was saved"


if __name__ == "__main__":
    main()
