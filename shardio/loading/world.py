"""Rank and world size of this process, and where ranks meet: from arguments, torch.distributed or the launcher."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from shardio.cache.meeting import Meeting
from shardio.errors import LaunchError
from shardio.order.orders import as_integer
from shardio.system.eager import warn_caller


@dataclass(frozen=True)
class World:
    """Rank and world size of this process. `source` says where they come from, for error messages. `local_rank` is the
    rank on this node, or None if it is unknown."""

    rank: int
    world_size: int
    local_rank: int | None
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"expected a rank from 0 to world_size - 1, found rank {self.rank} of {self.world_size} "
                f"(from {self.source}): give rank= and world_size=, or correct the launcher"
            )


# launcher -> its variables for rank, world size and, each under one of several names, local rank and the number of
# ranks on the node, with which the value begins. The innermost comes first: torchrun may be started by srun, and mpirun
# starts its helpers on other nodes by srun, whose variables the processes then inherit.
# SLURM: SLURM_STEP_NUM_TASKS and not SLURM_NTASKS. The latter is set in a batch script too, where a single process
# started without srun would take itself for rank 0 of many and leave out most of the data.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Horovod": ("HOROVOD_RANK", "HOROVOD_SIZE", ("HOROVOD_LOCAL_RANK",), ("HOROVOD_LOCAL_SIZE",)),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "PMI": (
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), ("SLURM_STEP_TASKS_PER_NODE",)),
}


# So that the meetings of a process's loaders have different names.
_MEETINGS = count()


def find_world(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] = os.environ
) -> World:
    """Returns rank and world size from the first source that knows them; rank 0 of 1 if no source does.

    The sources are, in this order: the arguments, torch.distributed if it is initialized, and the launcher's
    environment variables. Raises LaunchError if launchers contradict each other, if only one of rank and world size is
    known, or if the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise LaunchError(f"expected rank and world_size together, found rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        found = World(as_integer("rank", rank), as_integer("world_size", world_size), None, "arguments")
    else:
        found = world_of_torch() or _from_environment(environ)
    for source, local_ranks, _ in _believed(found, environ):
        for name in local_ranks:
            if name in environ:
                return replace(found, local_rank=_integer(environ, name, source))
    return found


def world_of_torch() -> World | None:
    """Returns rank and world size of torch.distributed; None if it is not initialized."""
    torch = sys.modules.get("torch")  # a process that has initialized it has imported it
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), None, "torch.distributed")


def meet_in_torch() -> Meeting | None:
    """Returns a Meeting of the ranks of torch.distributed; None if there is only one rank. All ranks must make their
    meetings in the same order. Raises LaunchError if torch.distributed is not initialized."""
    if (world := world_of_torch()) is None:
        raise LaunchError(
            "together=True needs torch.distributed: call init_process_group before the loader is made, or stage before "
            "by `shardio stage --together`"
        )
    if world.world_size == 1:
        return None
    store = store_of_torch(f"meeting{next(_MEETINGS)}")
    return Meeting(store, world.rank, world.world_size, os.environ.get("MASTER_ADDR") or socket.gethostname())


def rendezvous_of(text: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the host and port where the ranks of a job meet.

    They come from `text`, HOST:PORT; or else from MASTER_ADDR and MASTER_PORT; or else they are the first host of the
    SLURM step, and a port computed from the ids of the job and step. Raises LaunchError if none of these is given, or
    the port is not a number from 1 to 65535.
    """
    if text is None and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        text = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if text is None and (first := re.match(r"([^\[,]|\[[^\]]*\])+", hosts)):  # a1, a[1-3,7], a[1-2]b[3-4], or a list
        job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        # Below the ports that systems give to connections.
        host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
        text = f"{host}:{15000 + (job * 31 + step) % 17000}"
    host, _, port = (text or "").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise LaunchError(
            f"expected the address of rank 0, where the nodes meet, as HOST:PORT, found {text!r}: give it by "
            "--rendezvous, or set MASTER_ADDR and MASTER_PORT"
        )
    return host.strip("[]"), int(port)


def store_of_torch(prefix: str) -> Any:
    """Returns torch.distributed's store, whose keys get a prefix. torch.distributed must be initialized."""
    import torch.distributed as distributed

    torch: Any = distributed
    # The agent of torchrun may keep the store for ranks that it starts again.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return torch.PrefixStore(f"shardio{restart}/{prefix}/", torch.distributed_c10d._get_default_store())


def check_world(world: World) -> bool:
    """Returns whether torch.distributed is initialized with the rank and world size of `world`. Raises LaunchError if
    it is initialized with others, unless `world` comes from arguments."""
    now = world_of_torch()
    if now is None or (now.rank, now.world_size) == (world.rank, world.world_size):
        return now is not None
    if world.source == "arguments":
        return False
    raise LaunchError(
        f"this ShardLoader was made as rank {world.rank} of {world.world_size} (from {world.source}), but "
        f"torch.distributed says rank {now.rank} of {now.world_size}: make the loader after torch.distributed is "
        "initialized, or give rank= and world_size="
    )


def warn_if_alone(world: World, environ: Mapping[str, str] = os.environ) -> None:
    """Warns if only variables of a launcher say that this process is one of many. They may be left from another job, or
    mean trials that have nothing to do with each other."""
    jax = getattr(sys.modules.get("jax"), "distributed", None)
    meets = world_of_torch() is not None or getattr(jax, "is_initialized", bool)()
    if world.world_size == 1 or world.source not in _LAUNCHERS or "TORCHELASTIC_RUN_ID" in environ or meets:
        return
    rank, world_size, *_ = _LAUNCHERS[world.source]
    warn_caller(
        f"this ShardLoader reads 1/{world.world_size} of the set as rank {world.rank} of {world.world_size}, by {rank} "
        f"and {world_size}, and torch.distributed is not initialized: rank=0, world_size=1 reads all; if this is one "
        f"of {world.world_size} processes, give rank= and world_size=, or call init_process_group first"
    )


def _believed(world: World, environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yields (launcher, variables for the local rank, variables for the number of local ranks) for each launcher whose
    variables may be meant for this process.

    Launchers of torch processes set LOCAL_RANK. The variable of another launcher counts only if that launcher's rank
    and world size equal those of `world`. Otherwise it may have started one process that started others itself, and all
    of them inherit the same local rank.
    """
    told = (str(world.rank), str(world.world_size))
    for source, (rank, world_size, local_ranks, local_sizes) in _LAUNCHERS.items():
        if source == "torchrun" or (environ.get(rank), environ.get(world_size)) == told:
            yield source, local_ranks, local_sizes


def min_local_ranks(world: World, environ: Mapping[str, str] = os.environ) -> int:
    """Returns a lower bound of the number of ranks on this node: the launcher's number, or the local rank plus 1."""
    told = [
        int(number[0])
        for _, _, local_sizes in _believed(world, environ)
        for name in local_sizes
        if (number := re.match("[0-9]+", environ.get(name, "")))  # SLURM: 4(x2),3
    ]
    return min(max([(world.local_rank or 0) + 1, *told[:1]]), world.world_size)


def _from_environment(environ: Mapping[str, str]) -> World:
    """Returns rank and world size of the innermost launcher, or rank 0 of 1 without a launcher. Raises LaunchError if
    an outer launcher or another variable contradicts it."""
    inner: World | None = None
    for source, (rank, world_size, *_) in _LAUNCHERS.items():
        if rank not in environ or world_size not in environ or (source == "SLURM" and _is_shell(environ)):
            continue
        world = World(_integer(environ, rank, source), _integer(environ, world_size, source), None, source)
        if inner is None:
            inner = world
            # A torchrun that another launcher has started numbers its processes itself, and each task may have its own.
            if "TORCHELASTIC_RUN_ID" in environ and source == "torchrun":
                break
        elif inner.world_size == 1 < world.world_size or (
            world.world_size == inner.world_size and world.rank != inner.rank
        ):
            raise _contradiction(inner, f"{source} rank {world.rank} of {world.world_size}")
    inner = inner or World(0, 1, None, "default")
    # One of these variables alone is no launcher, but torch would believe it.
    for name, value in (("RANK", inner.rank), ("WORLD_SIZE", inner.world_size)):
        if name in environ and _integer(environ, name, "torchrun") != value:
            raise _contradiction(inner, f"{name}={environ[name]} in the environment")
    return inner


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Returns whether SLURM's variables are those of a shell that `srun --pty` started.

    An srun in that shell inherits SLURM_PTY_PORT, but gives its tasks no terminal."""
    try:
        stat = Path(f"/proc/{environ.get('SLURM_TASK_PID')}/stat").read_text(encoding="ascii", errors="replace")
        return "SLURM_PTY_PORT" in environ and stat.rpartition(")")[2].split()[4] != "0"
    except OSError:
        return "SLURM_PTY_PORT" in environ


def _contradiction(world: World, other: str) -> LaunchError:
    return LaunchError(
        f"{world.source} says rank {world.rank} of {world.world_size}, but found {other}: correct the environment, "
        "initialize torch.distributed before the loader is made, or give rank= and world_size="
    )


def _integer(environ: Mapping[str, str], name: str, source: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"expected an integer in {name}, which {source} sets; found {environ[name]!r}") from None
