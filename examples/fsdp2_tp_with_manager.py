"""Train under FSDP2 and tensor parallelism, stop, and go on in another layout.

    torchrun --nproc-per-node 4 examples/fsdp2_tp_with_manager.py [FOLDER]

The manager is made and called by all processes alike. With `Background(overlap=True)` it copies the shards during
forward and backward, and writes them in the background. The second half of the training runs on FSDP2 alone: a
checkpoint knows tensors, and not who held which part of them.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())


def fsdp2_and_tensor_parallel(model, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def fsdp2(model, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(root, layout, total, seed):
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    torch.manual_seed(seed)
    model = layout(nn.Sequential(Block(), Block()).to(device), device)
    optim = torch.optim.AdamW(model.parameters(), lr=0.001)
    losses = {}

    state = {"model": model, "optim": optim}
    with holdfast.CheckpointManager(
        root, every_steps=4, keep_last=2, background=holdfast.Background(overlap=True)
    ) as manager:
        restored = manager.restore(state)
        for step in range(restored.step + 1 if restored else 1, total + 1):
            # The same batch on all processes, so that layouts can be compared.
            inputs = torch.rand(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(inputs) - inputs.square()).square().mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            losses[step] = loss.item()
            manager.maybe_save(step, state, metrics={"loss": loss})
            if manager.should_stop:
                break
    if dist.get_rank() == 0:
        weight = model[0].up.weight
        print(f"steps {min(losses)} to {max(losses)}: {tuple(weight.device_mesh.shape)} {weight.placements}")
    return losses


def main():
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    folder = new_folder(sys.argv[1] if len(sys.argv) > 1 else None)

    uninterrupted = train(os.path.join(folder, "one-go"), fsdp2_and_tensor_parallel, total=12, seed=1)
    train(os.path.join(folder, "two-goes"), fsdp2_and_tensor_parallel, total=6, seed=1)
    resumed = train(os.path.join(folder, "two-goes"), fsdp2, total=12, seed=2)

    for step, loss in resumed.items():  # other layouts add the same numbers in another order
        torch.testing.assert_close(loss, uninterrupted[step], rtol=1e-5, atol=0)
    if dist.get_rank() == 0:
        print("Losses in one layout: ", *(f"{uninterrupted[step]:.4f}" for step in (7, 8, 12)))
        print("Losses in two layouts:", *(f"{resumed[step]:.4f}" for step in (7, 8, 12)))
    dist.destroy_process_group()


def new_folder(parent):
    """One that the first process makes, and all use."""
    chosen = [tempfile.mkdtemp(prefix="fsdp2-tp-", dir=parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]


if __name__ == "__main__":
    main()
