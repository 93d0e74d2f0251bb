"""Which rank of how many this process is: from the arguments, torch.distributed, or the launcher's variables."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardio.errors import LaunchError


@dataclass(frozen=True)
class World:
    """This process's `rank` among `world_size`; `local_rank` is its number on this node; `source` says who told."""

    rank: int
    world_size: int
    local_rank: int
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"expected a rank from 0 to world_size - 1, found rank {self.rank} of {self.world_size} "
                f"(from {self.source})"
            )


# launcher -> its variables for (rank, world size, local rank), from the innermost outwards: torchrun may be started by
# srun, and mpirun starts its helpers on other nodes by srun, whose variables the processes then inherit.
# SLURM: SLURM_STEP_NUM_TASKS and not SLURM_NTASKS. The latter is set in a batch script too, where a single process
# started without srun would take itself for rank 0 of many and leave out most of the data.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


def find_world(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] | None = None
) -> World:
    """Arguments if given, else torch.distributed if initialised, else the launcher's variables, else 0 of 1.

    Arguments are believed whatever else is set. Otherwise LaunchError if two sources contradict each other, if only one
    of rank and world size is known, or if they are not a rank of a world.
    """
    environ = os.environ if environ is None else environ
    if (rank is None) != (world_size is None):
        raise LaunchError(f"expected rank and world_size together, found rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        return World(operator.index(rank), operator.index(world_size), _local_rank(environ), "arguments")
    world = _from_torch(environ) or _from_environment(environ) or World(0, 1, 0, "default")
    _check_torchrun(world, environ)
    return world


def _from_torch(environ: Mapping[str, str]) -> World | None:
    torch = sys.modules.get("torch")  # whoever has initialised it has imported it
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return World(rank, world_size, _local_rank(environ), "torch.distributed")


def _local_rank(environ: Mapping[str, str]) -> int:
    """The launcher's, if it says one: when rank and world size come from elsewhere, nothing else of it matters."""
    try:
        world = _from_environment(environ)
    except LaunchError:
        return 0
    return world.local_rank if world else 0


def _from_environment(environ: Mapping[str, str]) -> World | None:
    """The innermost launcher's. One outside of it starts one process for several of it, never more than it has."""
    inner: World | None = None
    for source, (rank, world_size, local_rank) in _LAUNCHERS.items():
        if rank not in environ or world_size not in environ:
            continue
        values = [_integer(environ, name, source) for name in (rank, world_size)]
        local = _integer(environ, local_rank, source) if local_rank in environ else 0
        world = World(values[0], values[1], local, source)
        if inner is None:
            inner = world
            # A torchrun that another launcher has started numbers its processes itself, and each task may have its own.
            if "TORCHELASTIC_RUN_ID" in environ and source == "torchrun":
                break
        elif world.world_size > inner.world_size or (world.world_size == inner.world_size and world.rank != inner.rank):
            raise _contradiction(inner, f"{source} rank {world.rank} of {world.world_size}")
    return inner


def _check_torchrun(world: World, environ: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE are what torch itself will believe, also if only one of them is set."""
    for name, value in zip(_TORCHRUN, (world.rank, world.world_size), strict=False):
        if name in environ and _integer(environ, name, "torchrun") != value:
            raise _contradiction(world, f"{name}={environ[name]} in the environment")


def _contradiction(world: World, other: str) -> LaunchError:
    return LaunchError(
        f"{world.source} says rank {world.rank} of {world.world_size}, but found {other}: correct the environment, "
        "initialise torch.distributed before the loader is made, or give rank= and world_size="
    )


def _integer(environ: Mapping[str, str], name: str, source: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"expected an integer in {source}'s {name}, found {environ[name]!r}") from None
