"""A trainer that calls torch.distributed.checkpoint, as it is, with Holdfast's files under it.

    torchrun --nproc-per-node 2 examples/stock_trainer_native_format.py [FOLDER]

Two words change: `storage_writer` and `storage_reader`. Torch plans and lets the processes talk; what is written is a
checkpoint that is committed in one step, checks itself when it is read, and opens without torch.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


def save(model, optimizer, step, path):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, storage_writer=holdfast.HoldfastWriter(path, overwrite=True))


def load(model, optimizer, path):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, storage_reader=holdfast.HoldfastReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "stock-trainer")
    mesh = join()

    model, optimizer = build(mesh, seed=1)
    train(model, optimizer, steps=5)
    save(model, optimizer, 5, path)
    uninterrupted = train(model, optimizer, steps=3)

    model, optimizer = build(mesh, seed=2)  # as after a restart: other weights, and an optimizer that knows nothing
    step = load(model, optimizer, path)
    resumed = train(model, optimizer, steps=3)

    assert resumed == uninterrupted, f"{resumed} is not {uninterrupted}"
    if dist.get_rank() == 0:
        print(f"Losses after step {step}, without a break: ", ", ".join(f"{loss:.6f}" for loss in uninterrupted))
        print(f"Losses after step {step}, of a new program:", ", ".join(f"{loss:.6f}" for loss in resumed))
        print("holdfast.open finds", holdfast.open(path)["model.0.weight"])
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
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(mesh.device_type)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        device = next(model.parameters()).device
        inputs = torch.linspace(-1, 1, 64 * 16, device=device).reshape(64, 16)
        loss = (model(inputs) - inputs[:, :4].square()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
