"""Resume under FSDP1 (`FullyShardedDataParallel`) with an optimizer that has no state yet to load into.

    torchrun --nproc-per-node 2 examples/dcp/fsdp1_optimizer.py [FOLDER]

A new optimizer has no moments, so there is nothing to fill in place. `load_sharded_optimizer_state_dict` makes their
tensors after what the checkpoint holds, each process's rows of them, however many processes saved it.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - the usual name
from torch.distributed.fsdp import StateDictType

import holdfast.dcp as dcp
from holdfast.dcp.optimizer import load_sharded_optimizer_state_dict


def save(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])

        loaded = load_sharded_optimizer_state_dict(state["model"], "optimizer", dcp.FileSystemReader(folder))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, loaded["optimizer"]))


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "fsdp1-optimizer")
    warnings.filterwarnings("ignore", module="torch")  # FSDP1 is deprecated and says so at every step
    device = join()

    model, optimizer = build(device, seed=1)
    train(model, optimizer, steps=5)
    save(model, optimizer, folder)
    uninterrupted = train(model, optimizer, steps=3)

    model, optimizer = build(device, seed=2)
    assert not optimizer.state
    load(model, optimizer, folder)
    resumed = train(model, optimizer, steps=3)

    assert resumed == uninterrupted, f"{resumed} is not {uninterrupted}"
    if dist.get_rank() == 0:
        print("Losses without a break:", ", ".join(f"{loss:.6f}" for loss in uninterrupted))
        print("Losses after loading:  ", ", ".join(f"{loss:.6f}" for loss in resumed))
    dist.destroy_process_group()


def join() -> torch.device:
    """Meet the other processes; the device of this one is an accelerator if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    return device


def build(device, seed):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model = FSDP(layers, device_id=device, use_orig_params=True)
    return model, torch.optim.Adam(model.parameters(), lr=0.001)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        inputs = torch.linspace(-1, 1, 32 * 8, device=next(model.parameters()).device).reshape(32, 8)
        loss = (model(inputs) - inputs[:, :4].square()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
