"""Three factors instead of five code paths: over how many ranks parameters, gradients and optimizer state are split.

DDP, ZeRO-1/2/3 and hybrid sharding differ in three numbers only, F_p | F_g | F_o | W (each divides the next). A rank's
place at each level is a digit of its number, so that every level's ranges nest inside the level above, and every
gather or reduction works on one contiguous piece of one buffer.

Pure: no communication, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamina.errors import UsageError

NAMES = ("ddp", "zero1", "zero2", "zero3", "hsdp")


@dataclass(frozen=True)
class Strategy:
    """Sharding factors of parameters, gradients and optimizer state; 0 or None stands for the whole data world."""

    params: int | None
    grads: int | None
    optimizer: int | None


@dataclass(frozen=True)
class Level:
    """One gather or reduction stage: `size` ranks, `stride` apart in the order of data ranks."""

    size: int
    stride: int

    def members(self, rank: int) -> tuple[int, ...]:
        """Data ranks of the group that `rank` belongs to, in the order of their ranges."""
        first = rank - (rank // self.stride % self.size) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))

    def place(self, rank: int) -> int:
        return rank // self.stride % self.size


@dataclass(frozen=True)
class Factors:
    """Resolved factors over a data world of `world` ranks."""

    params: int
    grads: int
    optimizer: int
    world: int

    @property
    def levels(self) -> tuple[Level, Level, Level]:
        """Parameters, gradients, optimizer: the stages of sharding, innermost first. Stages of size 1 do nothing."""
        return (
            Level(self.params, 1),
            Level(self.grads // self.params, self.params),
            Level(self.optimizer // self.grads, self.grads),
        )

    @property
    def replicas(self) -> Level:
        """The stage across copies of the optimizer state."""
        return Level(self.world // self.optimizer, self.optimizer)

    def range_index(self, rank: int) -> int:
        """Which of the `optimizer` ranges of a segment this rank owns."""
        index = 0
        for level in self.levels:
            index = index * level.size + level.place(rank)
        return index

    @property
    def shards_parameters(self) -> bool:
        return self.params > 1

    @property
    def uses_shards(self) -> bool:
        """Whether parameters are `Shard`s outside compute."""
        return self.optimizer > 1

    def bytes_moved(self, numel: int, compute_bytes: int, gradient_bytes: int, regathers: int = 2) -> dict[str, int]:
        """Payload of one step's collectives over `numel` parameters, in whole-buffer bytes; an all-reduce counts twice.

        `regathers`: gathers of a parameter per step where parameters are sharded.
        """
        moved = {"gather": 0, "reduce": 0}
        if self.params > 1:
            moved["gather"] += numel * compute_bytes * regathers
        for level in self.levels[1:]:  # once a step, after the optimizer; a level's stride is what is split inside it
            if level.size > 1:
                moved["gather"] += numel * compute_bytes // level.stride
        summed = 1  # ranks whose gradients are in the sum already; after the first stage sums travel in fp32
        for level in self.levels:
            if level.size > 1:
                moved["reduce"] += numel * (gradient_bytes if summed == 1 else 4) // summed
                summed *= level.size
        if self.replicas.size > 1:
            moved["reduce"] += 2 * numel * 4 // self.optimizer
        return moved

    def check(self) -> None:
        assert self.params >= 1 and self.grads % self.params == 0
        assert self.optimizer % self.grads == 0 and self.world % self.optimizer == 0
        owners = [self.range_index(rank) for rank in range(self.optimizer)]
        assert sorted(owners) == list(range(self.optimizer)), "every range has one owner in each replica"


def resolve(strategy: str | Strategy, world: int, shard_size: int | None = None) -> Factors:
    """Factors of a named or explicit strategy.

    Args:
        strategy: a name of `NAMES`, or a `Strategy`.
        world: number of data ranks.
        shard_size: ranks that share one copy in `hsdp` (the mesh's "shard" axis, or the ranks of a node).
    """
    if isinstance(strategy, Strategy):
        given = (strategy.params, strategy.grads, strategy.optimizer)
        for word, value in zip(("params", "grads", "optimizer"), given, strict=True):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise UsageError(f"Strategy({word}={value!r}): a factor is a positive number of ranks, or None for all")
        factors = tuple(value or world for value in given)
    elif strategy == "hsdp":
        factors = (_hybrid_size(world, shard_size),) * 3
    elif strategy in NAMES:
        inner = shard_size if shard_size is not None and shard_size < world else None
        whole = inner or world
        named = {"ddp": (1, 1, 1), "zero1": (1, 1, whole), "zero2": (1, whole, whole), "zero3": (whole,) * 3}
        factors = named[strategy]
    else:
        raise UsageError(
            f"unknown strategy {strategy!r}: use one of {', '.join(repr(n) for n in NAMES)}, "
            "or lamina.Strategy(params=, grads=, optimizer=)"
        )
    return _legal(factors, world)


def _hybrid_size(world: int, shard_size: int | None) -> int:
    if world == 1:
        return 1  # the same script under plain python
    if shard_size is None:
        raise UsageError(
            f"strategy='hsdp' needs ranks in groups: all {world} ranks are on one node and no mesh says otherwise. "
            "Type strategy='zero3', or give mesh=init_device_mesh(device, (replicas, shards), "
            "mesh_dim_names=('replicate', 'shard'))"
        )
    return shard_size


def _legal(factors: tuple[int, ...], world: int) -> Factors:
    params, grads, optimizer = factors
    for smaller, larger, text in (
        (params, grads, f"params={params} must divide grads={grads}"),
        (grads, optimizer, f"grads={grads} must divide optimizer={optimizer}"),
        (optimizer, world, f"optimizer={optimizer} must divide the {world} data ranks"),
    ):
        if larger % smaller:
            raise UsageError(f"sharding factors do not divide: {text} (params | grads | optimizer | ranks)")
    return Factors(params, grads, optimizer, world)
