"""How much is measured: the full suite, the quick one, and one that only shows that everything runs."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """The sizes of all workloads, and how often they are repeated."""

    name: str
    minutes: float
    """All of it takes about that long, on a quiet machine."""
    fewest_rounds: int
    """That everybody takes part in."""
    rounds: int
    """For all that a row with a target compares."""
    most_rounds: int
    """If there is time."""
    layers: int
    width: int
    vocabulary: int
    small_tensors: int
    slow_peers: bool
    """Whether those save and load small tensors too that take very long for it."""
    huge_bytes: int
    sliced_shape: tuple[int, int]
    """Of the tensor that slices are read from. Its rows have several digest blocks: columns need not be whole rows."""
    resharded_bytes: int
    resharded_tensors: int
    world_sizes: tuple[int, ...]
    """All of them save, and all others load that."""
    stalled_bytes: int
    """Of the state whose background saves are measured."""
    stalled_tensors: int
    trained_bytes: int
    """Of the state of a training loop that saves all the time."""
    converted_bytes: int
    """Of the state that is converted to other formats."""
    many_ranks: tuple[int, ...]
    """Real processes, which save and load many small tensors."""
    many_ranks_tensors: int
    many_ranks_jobs: int
    """How often there is a first save."""
    planned_ranks: int
    """Of which only the root is there, and plans for all."""
    planned_tensors: int
    exchanged_bytes: tuple[int, ...]
    """Of states that are saved and loaded by two numbers of processes."""
    exchanged_by: tuple[int, int]
    replicated_ranks: int
    """Which load what several of them need."""
    replicated_bytes: int
    memory_workloads: tuple[str, ...] = ("transformer", "small tensors", "huge tensor")

    @property
    def transformer_bytes(self) -> int:
        """About: parameters and two moments of 4 bytes each."""
        return 12 * (self.layers * 12 * self.width**2 + self.vocabulary * self.width)


FULL = Scale(
    name="full",
    minutes=10,
    fewest_rounds=3,
    rounds=5,
    most_rounds=7,
    layers=12,
    width=1_024,
    vocabulary=32_000,
    small_tensors=20_000,
    slow_peers=True,
    huge_bytes=1024 * MIB,
    sliced_shape=(2_048, 65_536),
    resharded_bytes=256 * MIB,
    resharded_tensors=32,
    world_sizes=(1, 2, 4),
    stalled_bytes=1200 * MIB,
    stalled_tensors=150,
    trained_bytes=192 * MIB,
    converted_bytes=2000 * MIB,
    many_ranks=(32, 64),
    many_ranks_tensors=300,
    many_ranks_jobs=1,
    planned_ranks=1_024,
    planned_tensors=300,
    exchanged_bytes=(256 * MIB, 1024 * MIB),
    exchanged_by=(4, 2),
    replicated_ranks=8,
    replicated_bytes=64 * MIB,
)

QUICK = Scale(
    name="quick",
    minutes=1.6,
    fewest_rounds=2,
    rounds=3,
    most_rounds=3,
    layers=6,
    width=384,
    vocabulary=16_000,
    small_tensors=4_000,
    slow_peers=False,
    huge_bytes=256 * MIB,
    sliced_shape=(512, 65_536),
    resharded_bytes=64 * MIB,
    resharded_tensors=16,
    world_sizes=(1, 2, 4),
    stalled_bytes=256 * MIB,
    stalled_tensors=60,
    trained_bytes=48 * MIB,
    converted_bytes=300 * MIB,
    many_ranks=(8,),
    many_ranks_tensors=300,
    many_ranks_jobs=1,
    planned_ranks=128,
    planned_tensors=300,
    exchanged_bytes=(64 * MIB,),
    exchanged_by=(4, 2),
    replicated_ranks=8,
    replicated_bytes=16 * MIB,
)

TINY = Scale(
    name="tiny",
    minutes=0.05,
    fewest_rounds=1,
    rounds=1,
    most_rounds=1,
    layers=1,
    width=64,
    vocabulary=1_000,
    small_tensors=100,
    slow_peers=True,
    huge_bytes=MIB // 2,
    sliced_shape=(256, 1_024),
    resharded_bytes=2 * MIB,
    resharded_tensors=4,
    world_sizes=(1, 2),
    stalled_bytes=MIB,
    stalled_tensors=6,
    trained_bytes=MIB // 4,
    converted_bytes=2 * MIB,
    many_ranks=(4,),
    many_ranks_tensors=3,
    many_ranks_jobs=1,
    planned_ranks=16,
    planned_tensors=3,
    exchanged_bytes=(MIB,),
    exchanged_by=(2, 1),
    replicated_ranks=4,
    replicated_bytes=MIB,
    memory_workloads=("huge tensor",),
)

SCALES = {scale.name: scale for scale in (FULL, QUICK, TINY)}
