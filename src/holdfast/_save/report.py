"""What a save did: the same on all ranks, for programs as fields and for people as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    phases: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """How many seconds each took, by rank: ``capture``, ``stage`` (the copy of a background save), ``plan``, ``write``;
    and ``commit``, which one rank does. Of many ranks only those that ``ranks`` lists."""
    ranks: Sequence[int] = ()
    """The ranks that ``phases`` has numbers of: all, or the 20 slowest if there are more."""

    @property
    def slowest_rank(self) -> int:
        """The one that took longest to write."""
        seconds = self.phases.get("write", [0.0])
        place = max(range(len(seconds)), key=seconds.__getitem__)
        return self.ranks[place] if self.ranks else place

    def __str__(self) -> str:
        rate = f", {self.bytes_written / self.seconds / 1e6:,.0f} MB/s" if self.seconds > 0 else ""
        ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
        tensors = "1 tensor" if self.tensor_count == 1 else f"{self.tensor_count:,} tensors"
        return (
            f"saved {tensors} to {self.path}{ranks}\n"
            f"  {self.bytes_written:,} bytes written in {self.seconds:.2f} s{rate}"
        )
