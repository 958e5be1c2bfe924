"""What a save did: the same on all ranks, for programs as fields and for people as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveReport:
    """What a save did, over all ranks together."""

    path: str
    identity: str
    """Which save it was: loads from it report the same."""
    tensor_count: int
    bytes_written: int
    """In all data files."""
    seconds: float = 0.0
    """By the slowest rank."""
    world_size: int = 1

    def __str__(self) -> str:
        rate = f", {self.bytes_written / self.seconds / 1e6:,.0f} MB/s" if self.seconds > 0 else ""
        ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
        tensors = "1 tensor" if self.tensor_count == 1 else f"{self.tensor_count:,} tensors"
        return (
            f"saved {tensors} to {self.path}{ranks}\n"
            f"  {self.bytes_written:,} bytes written in {self.seconds:.2f} s{rate}"
        )
