"""Random streams: those of Python, numpy, torch and the accelerators, of one rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from holdfast._base.notices import warn_caller
from holdfast._formats.native.refs import ANYTHING
from holdfast._state.contract import Adapter
from holdfast._state.per_rank import FromFirst, PerRank, ResizeRule

# The random streams of torch on accelerators.


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


_FORMS = ("python", "numpy", "torch")


class RngState:
    """The global random streams of this rank, as a part of a state. Each rank saves and restores its own.

    They are those of ``random``, of ``numpy.random`` (the functions, not generators of one's own), of torch on the CPU
    and of torch on every accelerator that the process sees. After a load the same numbers follow as did after the save.

    With another number of ranks the streams cannot be the same. ``on_resize="derive"`` gives each rank new ones, which
    differ from rank to rank and depend on nothing but the stored streams of rank 0, the rank and the number of ranks;
    it warns. ``"error"`` refuses, ``"first"`` gives all ranks the streams of rank 0, and a function chooses: see
    ``PerRank``.

    >>> streams = RngState()
    >>> captured = streams.capture()
    >>> before = random.random(), torch.rand(1).item()
    >>> streams.restore(captured)
    >>> (random.random(), torch.rand(1).item()) == before
    True
    """

    def __init__(self, on_resize: Literal["derive", "error", "first"] | ResizeRule = "derive") -> None:
        if not callable(on_resize) and on_resize not in ("derive", "error", "first"):
            raise ValueError(f"on_resize must be 'derive', 'error', 'first' or a function, not {on_resize!r}")
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"RngState(on_resize={self.on_resize!r})"

    def capture(self) -> dict[str, Any]:
        """The streams as they stand now: plain values, arrays and tensors."""
        version, numbers, gauss = random.getstate()
        return {
            "python": {"version": version, "numbers": np.array(numbers, dtype=np.uint32), "gauss": gauss},
            "numpy": _numpy_form(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state(),
            **capture(),
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Put the streams back. What was captured stays as it is and may be restored again."""
        # Streams that belong to nobody show whether all is well formed, before any other is changed.
        try:
            python_state = _python_state(captured["python"])
            random.Random().setstate(python_state)
            numpy_state = _numpy_state(captured["numpy"])
            _spare_numpy_stream().set_state(numpy_state)
            torch.Generator().set_state(captured["torch"])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"These are not random streams of RngState: {error}. No stream was changed") from error

        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(captured["torch"])
        for problem in restore(captured):
            warn_caller(problem)

    def as_per_rank(self) -> PerRank:
        """The same as a state per rank, with its rule for other numbers of ranks."""
        return PerRank(self, FromFirst(_derive_from_first) if self.on_resize == "derive" else self.on_resize)


class RngAdapter(Adapter):
    """Saves and loads the streams."""

    def __init__(self, target: RngState) -> None:
        self._target = target
        self._notes: list[str] = []

    def saved(self) -> Any:
        return self._target.capture()

    def template(self, stored: Any) -> Any:
        # What devices there are is a matter of the machine that saved.
        return dict.fromkeys(_FORMS if stored is None else stored, ANYTHING)

    def apply(self, loaded: Any) -> None:
        loaded = dict(loaded)
        derived = loaded.pop("derived", None)
        if derived is not None:
            self._notes.append(derived)
            warn_caller(derived)
        self._target.restore(loaded)

    def notes(self) -> list[str]:
        return list(self._notes)


def derive(captured: Mapping[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """New streams from captured ones, of good quality for each rank and always the same.

    >>> captured = RngState().capture()
    >>> first, second = derive(captured, 0, 2), derive(captured, 1, 2)
    >>> bool((first["torch"] == second["torch"]).all())
    False
    """
    root = _digest(captured)

    def seed(stream: str, bits: int = 64) -> int:
        text = f"{root}/{stream}/{rank}/{world_size}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[: bits // 8], "little")

    version, numbers, gauss = random.Random(seed("python", 256)).getstate()
    numpy_stream = np.random.RandomState(np.random.MT19937(seed("numpy", 256)))
    return {
        "python": {"version": version, "numbers": np.array(numbers, dtype=np.uint32), "gauss": gauss},
        "numpy": _numpy_form(numpy_stream.get_state(legacy=False)),
        "torch": torch.Generator().manual_seed(seed("torch")).get_state(),
        "devices": {name: seed(name) for name in captured.get("devices", {})},
        "current_device": captured.get("current_device"),
    }


def _derive_from_first(values: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
    note = (
        f"The random streams were saved by another number of ranks than the {world_size} there are now: each rank got "
        "new streams, derived from those of rank 0"
    )
    return {**derive(values[0], rank, world_size), "derived": note}


def _digest(captured: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    digest.update(np.ascontiguousarray(captured["python"]["numbers"], dtype="<u4").tobytes())
    digest.update(repr(sorted((key, _plain(value)) for key, value in captured["numpy"].items())).encode())
    digest.update(captured["torch"].numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((key, _plain(inner)) for key, inner in value.items())
    return value.tolist() if isinstance(value, np.ndarray) else value


def _python_state(form: Mapping[str, Any]) -> tuple[Any, ...]:
    return int(form["version"]), tuple(int(number) for number in form["numbers"]), form["gauss"]


def _spare_numpy_stream() -> np.random.RandomState:
    """A stream of the kind that numpy's functions use now."""
    kind = getattr(np.random, np.random.get_state(legacy=False)["bit_generator"])
    return np.random.RandomState(kind(0))


def _numpy_form(state: Mapping[str, Any]) -> dict[str, Any]:
    if state["bit_generator"] != "MT19937":  # somebody replaced it: see numpy.random.set_bit_generator
        return {"name": state["bit_generator"], "state": dict(state)}
    key, position = state["state"]["key"], state["state"]["pos"]
    return {
        "name": "MT19937",
        "numbers": np.array(key, dtype=np.uint32),
        "position": int(position),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _numpy_state(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["name"] != "MT19937":
        return dict(form["state"])
    inner = {"key": np.asarray(form["numbers"], dtype=np.uint32), "pos": form["position"]}
    return {
        "bit_generator": "MT19937",
        "state": inner,
        "has_gauss": form["has_gauss"],
        "gauss": form["gauss"],
    }
