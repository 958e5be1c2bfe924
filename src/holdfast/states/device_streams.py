"""The random streams of torch on accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The streams of all devices that this process sees, and which of them it uses."""
    accelerator = _accelerator()
    if accelerator is None:
        return {"devices": {}, "current_device": None}
    count = torch.accelerator.device_count()
    streams = {f"{accelerator}:{index}": _generator_state(accelerator, index) for index in range(count)}
    return {"devices": streams, "current_device": f"{accelerator}:{torch.accelerator.current_device_index()}"}


def restore(captured: Mapping[str, Any]) -> list[str]:
    """Put captured streams back, that of the device in use to the device in use now. Returns what could not be done.

    A whole number in place of a stream is a seed for a new one.
    """
    streams = dict(captured.get("devices", {}))
    accelerator = _accelerator()
    here = set()
    current = None
    if accelerator is not None:
        here = {f"{accelerator}:{index}" for index in range(torch.accelerator.device_count())}
        current = f"{accelerator}:{torch.accelerator.current_device_index()}"
    used = captured.get("current_device")
    if current is not None and used in streams and used != current:
        # Ranks are placed on devices anew with every start; what counts is the device that a rank works with.
        streams[current], streams[used] = streams[used], streams.get(current, streams[used])
    for name, stream in streams.items():
        if name in here:
            _set_generator_state(name, stream)
    if current is not None and current not in streams:
        return [f"No random stream is stored for {current}, which goes on with the one it has"]
    if used is not None and current is None:
        return [f"The stored random stream of {used} is left out: there is no accelerator here"]
    return []


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def _generator_state(accelerator: str, index: int) -> torch.Tensor:
    module: Any = torch.get_device_module(accelerator)
    state: torch.Tensor = module.get_rng_state() if accelerator == "mps" else module.get_rng_state(index)
    return state.cpu()


def _set_generator_state(name: str, stream: torch.Tensor | int) -> None:
    device = torch.device(name)
    module: Any = torch.get_device_module(device.type)
    if isinstance(stream, int):
        stream = _new_generator(device).manual_seed(stream).get_state()
    if device.type == "mps":
        module.set_rng_state(stream)
    else:
        module.set_rng_state(stream, device.index)


def _new_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)
