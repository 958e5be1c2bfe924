"""Save a model that FSDP2 has sharded, with its optimizer, and load both into a new program.

    torchrun --nproc-per-node 2 examples/dcp/save_and_load.py [FOLDER]

Every process writes the shards that it holds. `load` fills tensors in place, so a new model and a new optimizer are
asked for their state first: it says which tensors are wanted, and how this process shards them.
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
from holdfast.dcp.state_dict import get_state_dict, set_state_dict


def save(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "loss": loss_of(model).item()}
    dcp.save(state, checkpoint_id=folder)


def load(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "save-and-load")
    mesh = join()

    model, optimizer = build(mesh, seed=1)
    train(model, optimizer, steps=5)
    save(model, optimizer, folder)
    uninterrupted = train(model, optimizer, steps=3)

    model, optimizer = build(mesh, seed=2)  # as after a restart: other weights, and an optimizer that knows nothing
    load(model, optimizer, folder)
    resumed = train(model, optimizer, steps=3)

    assert resumed == uninterrupted, f"{resumed} is not {uninterrupted}"
    if dist.get_rank() == 0:
        print("Losses without a break:", ", ".join(f"{loss:.6f}" for loss in uninterrupted))
        print("Losses after loading:  ", ", ".join(f"{loss:.6f}" for loss in resumed))
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


def loss_of(model):
    device = next(model.parameters()).device
    inputs = torch.linspace(-1, 1, 64 * 16, device=device).reshape(64, 16)
    return (model(inputs) - inputs[:, :4].square()).square().mean()


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
