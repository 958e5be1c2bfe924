"""Save a sharded training run as it stands, and go on from there in a new program.

    torchrun --nproc-per-node 2 examples/save_and_resume.py [FOLDER]

The state names the objects that have to survive. Models and optimizers are given as they are; every process writes the
shards that it holds. The new optimizer has made no step yet, and is filled all the same.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "save-and-resume")
    mesh = join()

    state = build(mesh, seed=1)
    train(state, steps=5)
    holdfast.save(state, path, overwrite=True, metadata={"note": "after five steps"})
    uninterrupted = train(state, steps=3)

    state = build(mesh, seed=2)  # as after a restart: other weights, and an optimizer that knows nothing
    report = holdfast.load(state, path)
    resumed = train(state, steps=3)

    assert resumed == uninterrupted, f"{resumed} is not {uninterrupted}"
    assert state["step"] == 8
    if dist.get_rank() == 0:
        print("Losses without a break:", ", ".join(f"{loss:.6f}" for loss in uninterrupted))
        print("Losses after loading:  ", ", ".join(f"{loss:.6f}" for loss in resumed))
        print(f"{len(report.read)} keys, {report.elements} elements on {report.world_size} ranks")
    dist.destroy_process_group()


def join() -> DeviceMesh:
    """Meet the other processes, on the accelerators if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return init_device_mesh(device.type, (dist.get_world_size(),))


def build(mesh, seed):
    torch.manual_seed(seed + dist.get_rank())
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 4)).to(mesh.device_type)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return {"model": model, "optim": optimizer, "sched": scheduler, "rng": holdfast.RngState(), "step": 0}


def train(state, steps):
    losses = []
    for _ in range(steps):
        inputs = torch.rand(8, 16, device=next(state["model"].parameters()).device)  # the random streams matter
        loss = (state["model"](inputs) - inputs[:, :4].square()).square().mean()
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        state["sched"].step()
        state["step"] += 1
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
