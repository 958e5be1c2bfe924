"""Let the application say what its state is: objects with `state_dict` and `load_state_dict`, saved by themselves.

    torchrun --nproc-per-node 2 examples/dcp/application_state.py [FOLDER]

`save` asks every such object for its state, `load` gives it back. The training loop need not know what is inside.
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
from holdfast.dcp.stateful import Stateful


class Trainer(Stateful):
    """A model, its optimizer, and how far they got."""

    def __init__(self, mesh, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(mesh.device_type)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.steps = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.schedule.load_state_dict(state_dict["schedule"])
        self.steps = state_dict["steps"]

    def train(self, steps):
        """Returns what every step saw: its number, its learning rate and its loss."""
        seen = []
        for _ in range(steps):
            self.steps += 1
            inputs = torch.linspace(-1, 1, 32 * 8, device=next(self.model.parameters()).device).reshape(32, 8)
            loss = (self.model(inputs) - inputs[:, :4].square()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append((self.steps, self.schedule.get_last_lr()[0], loss.item()))
            self.schedule.step()
        return seen


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "application-state")
    mesh = join()

    trainer = Trainer(mesh, seed=1)
    trainer.train(steps=5)
    dcp.save({"trainer": trainer}, checkpoint_id=folder)
    uninterrupted = trainer.train(steps=3)

    trainer = Trainer(mesh, seed=2)  # as after a restart
    dcp.load({"trainer": trainer}, checkpoint_id=folder)
    resumed = trainer.train(steps=3)

    assert resumed == uninterrupted, f"{resumed} is not {uninterrupted}"
    if dist.get_rank() == 0:
        for step, rate, loss in resumed:
            print(f"Step {step}, learning rate {rate:.4f}, loss {loss:.6f}: the same as without a break")
    dist.destroy_process_group()


def join() -> DeviceMesh:
    """Meet the other processes, on the accelerators if there are any."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return init_device_mesh(device.type, (dist.get_world_size(),))


if __name__ == "__main__":
    main()
