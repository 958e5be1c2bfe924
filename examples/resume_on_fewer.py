"""Save on all processes, go on with half of them: tensors need nothing, per-rank state needs a rule.

    torchrun --nproc-per-node 4 examples/resume_on_fewer.py [FOLDER]

Every process reads its own files of the data set and knows how far it got. With another number of processes somebody
has to say who goes on with which file; `on_resize` is that rule.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast


def deal_out(values, rank, world_size):
    """Every process takes over the positions of some of those that saved."""
    merged = {}
    for value in values[rank::world_size]:
        merged.update(value)
    return merged


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    path = os.path.join(folder, "resume-on-fewer")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = torch.arange(30.0).reshape(10, 3)

    everyone = DeviceMesh(device.type, list(range(world_size)))
    positions = {f"part-{rank}": 100 + rank}
    state = {"weights": distribute_tensor(weights, everyone, [Shard(0)]), "data": holdfast.PerRank(positions)}
    holdfast.save(state, path, overwrite=True)

    half = list(range(world_size // 2))
    remaining = dist.new_group(half)
    fewer = DeviceMesh(device.type, half)
    if rank in half:
        state = {
            "weights": distribute_tensor(torch.zeros(10, 3), fewer, [Shard(1)]),
            "data": holdfast.PerRank({}, on_resize=deal_out),
        }
        holdfast.load(state, path, process_group=remaining)
        assert torch.equal(state["weights"].full_tensor().cpu(), weights)
        positions = [None] * len(half)
        dist.all_gather_object(positions, state["data"].value, group=remaining)
        if rank == 0:
            for number, position in enumerate(positions):
                print(f"rank {number} of {len(half)} goes on with {position}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
