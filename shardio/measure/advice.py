"""What `shardio doctor` concludes: facts in, advice out, and nothing is looked at here.

Each rule is a generator that takes one value of facts. Where the loader decides the same, the rule repeats its decision
(`reading.choose`), so that the two cannot contradict each other.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardio.reading import choose
from shardio.sets.names import is_url
from shardio.system.amounts import bytes_text
from shardio.system.machine import is_network, is_shared

Severity = Literal["error", "warning", "hint"]
_SEVERITIES = get_args(Severity)

# torch, a launcher and the libraries for a GPU have some hundred files and sockets open.
_ENOUGH_DESCRIPTORS = 1024
# Libraries map four or five pieces each: a process with torch has about a thousand mappings.
_MAPPINGS_FOR_OTHERS = 2000
# Of address space: torch with CUDA reserves much more than it uses.
_ADDRESSES_FOR_OTHERS = 16 << 30
# A container has 64 MiB by default, which is less than a few batches of a DataLoader's workers.
_ENOUGH_SHM = 128 << 20
# Less is taken for a disk that is full: an index and a manifest need some of it.
_ENOUGH_DISK = 1 << 30
_MEMORY = ("tmpfs", "ramfs")
# An epoch that reads for less is not worth a warm-up.
_LITTLE_SECONDS = 10.0
# Half of what eight lanes of PCIe 4 give.
_SLOW_COPIES = 8e9


@dataclass(frozen=True)
class Advice:
    """One finding. `found` has the figure, `follows` the consequence, `cure` a command or a line of Python."""

    severity: Severity
    found: str
    follows: str
    cure: str

    def __post_init__(self) -> None:
        if self.severity not in _SEVERITIES:
            raise ValueError(f"severity must be one of {', '.join(_SEVERITIES)}; found {self.severity!r}")


@dataclass(frozen=True)
class MachineFacts:
    """What this process has of the machine. None is: unknown, or no limit."""

    cores: int
    """Those that the loader uses: see machine.usable_cores."""
    cores_of_machine: int
    cores_granted: int | None
    """What the job scheduler's variables say."""
    memory_left: int | None
    descriptors: int | None
    mappings: int | None
    """How many more this process may make."""
    address_space: int | None
    locked_memory: int | None
    shm_free: int | None
    huge_pages: str
    """What the kernel does for memory that asks for huge pages: always, madvise or never; "" if it does not say."""
    numa_nodes: int
    kernels: Mapping[str, str]
    missing_kernels: str
    versions: Mapping[str, str]
    """Of Python and the libraries; "" for one that is not installed."""
    torch_cuda: str
    """The version of CUDA that torch was built for; "" for none."""
    has_driver: bool
    """Whether the kernel has a driver of NVIDIA."""
    torch_sees_gpu: bool | None
    """None: not asked, as torch or the driver is missing anyway."""
    gpus: Mapping[str, float]
    """Bytes a second that copies from pinned memory reach, by the name of the GPU."""
    lost_roots: tuple[str, ...]
    """Folders in SHARDIO_PATH that are not there."""


@dataclass(frozen=True)
class SetFacts:
    path: str
    filesystem: str
    free_nbytes: int | None
    fault: str = ""
    """Why the set cannot be read."""
    digest: str = ""
    num_files: int = 0
    nbytes: int = 0
    split: str = ""
    """The split that has the most samples: the one that `reading` is about."""
    reading: choose.Facts | None = None
    """What the loader chooses a reader by."""
    reads_per_second: float | None = None
    """Bytes that the disk gives, in random samples, past the page cache."""


@dataclass(frozen=True)
class CacheFacts:
    path: str
    filesystem: str
    problem: str = ""
    """Why it cannot be a cache, or cannot be written to."""
    has_locks: bool | None = None
    free_nbytes: int | None = None
    evictable_nbytes: int = 0
    """Of copies that no process uses."""
    complete: tuple[str, ...] = ()
    """The digests of the sets that it holds whole."""


def advise(
    machine: MachineFacts | None = None, shards: SetFacts | None = None, cache: CacheFacts | None = None
) -> list[Advice]:
    """Returns what would break or slow training or converting, the worst first."""
    found: list[Advice] = []
    if shards is not None:
        found += _about_set(shards, cached=cache is not None)
    if cache is not None:
        found += _about_cache(cache)
    if machine is not None and shards is not None:
        found += _about_limits(machine, shards)
    if shards is not None and cache is not None and not cache.problem:
        found += _about_room(cache, shards, machine.memory_left if machine else None)
    if machine is not None:
        found += _about_machine(machine)
    return sorted(found, key=lambda advice: _SEVERITIES.index(advice.severity))


def would_break(found: Iterable[Advice]) -> bool:
    return any(advice.severity == "error" for advice in found)


def _about_set(facts: SetFacts, cached: bool) -> Iterator[Advice]:
    quoted = shlex.quote(facts.path)
    if facts.fault:
        yield Advice(
            "error",
            facts.fault,
            "no job can read the set",
            f"shardio stage {quoted} CACHE"
            if is_url(facts.path)
            else f"shardio verify {quoted}, which says how to repair it; or shardio convert SRC OUT",
        )
    if facts.free_nbytes is not None and facts.free_nbytes < _ENOUGH_DISK:
        yield Advice(
            "warning",
            f"{facts.path} has {bytes_text(facts.free_nbytes)} of free space left",
            "a conversion into it stops, and goes on when there is room; reading needs none",
            "make room there, or convert into a folder on another disk",
        )
    where = f"{facts.path} lies on {facts.filesystem}"
    if is_network(facts.filesystem) and not cached:
        yield Advice(
            "warning",
            f"{where}, a network filesystem",
            "all nodes share its rate, each epoch reads through the network, and a server that is away stops training",
            'ShardLoader(..., cache="/local/disk"), or before the job: shardio stage OUT /local/disk',
        )
    if facts.filesystem in _MEMORY:
        yield Advice(
            "warning",
            f"{where}: its {bytes_text(facts.nbytes)} are memory",
            "a job cannot have this memory, and the set is gone after a reboot",
            "a folder on a disk; the page cache makes it as fast, and gives way",
        )
    if facts.filesystem == "overlay":
        yield Advice(
            "hint",
            f"{where}, the container's own layer",
            "it goes with the container, and is often a slow disk",
            "mount a volume for it (docker run -v /data:/data), and convert into that",
        )
    if facts.reading is not None:
        yield from _about_reading(facts, facts.reading)


def _about_reading(facts: SetFacts, reading: choose.Facts) -> Iterator[Advice]:
    if reading.resident_share == 1.0:
        return
    rate = facts.reads_per_second
    lasts = (
        f"; at the {bytes_text(rate)}/s measured here one epoch takes {_time(reading.nbytes / rate)}" if rate else ""
    )
    if not choose.fits_in_memory(reading):
        yield Advice(
            "warning",
            f"{facts.split}: {choose.choose(reading).reason}",
            f"each epoch reads from storage, and not from memory{lasts}",
            "more memory for the job (sbatch --mem, docker --memory), a smaller --size, or "
            'ShardLoader(..., shuffle="block") where the disk is slow at random reads',
        )
    elif reading.resident_share is not None and not (rate and reading.nbytes / rate < _LITTLE_SECONDS):
        yield Advice(
            "hint",
            f"{facts.split}: {reading.resident_share:.0%} of its {bytes_text(reading.nbytes)} are in the page cache",
            f"the first epoch reads the rest from the disk, and is slower than the others{lasts}",
            f"shardio warm {shlex.quote(facts.path)} --split {facts.split}",
        )


def _about_cache(facts: CacheFacts) -> Iterator[Advice]:
    if facts.problem:
        yield Advice(
            "error",
            facts.problem,
            "no set can be staged there",
            "a writable folder on a disk of this machine, which shardio stage makes: shardio stage OUT CACHE",
        )
    elif facts.has_locks is False:
        yield Advice(
            "error",
            f"{facts.path}: {facts.filesystem or 'this filesystem'} refuses flock",
            "a copy in use could not be told from one that may be evicted",
            "a cache on another local disk (ext4, xfs); for NFS and Lustre the mount option flock",
        )
    if is_shared(facts.filesystem) and not facts.problem:
        yield Advice(
            "warning",
            f"{facts.path} lies on {facts.filesystem}, a network filesystem",
            "a cache there saves nothing, and its locks need not be seen by other machines",
            "a cache on a disk of this machine",
        )


def _about_room(cache: CacheFacts, shards: SetFacts, memory: int | None) -> Iterator[Advice]:
    if shards.digest in cache.complete or not shards.nbytes:
        return
    if cache.free_nbytes is not None and shards.nbytes > cache.free_nbytes:
        room = f"{cache.path} has {bytes_text(cache.free_nbytes)} free"
        evictable = cache.evictable_nbytes
        if shards.nbytes > cache.free_nbytes + evictable:
            yield Advice(
                "error",
                f"{room} and {bytes_text(evictable)} in unused copies, for the set's {bytes_text(shards.nbytes)}",
                "the set cannot be staged there",
                "a larger disk for the cache, or make room on this one; without cache= the set is read where it is",
            )
        else:
            yield Advice(
                "hint",
                f"{room}, for the set's {bytes_text(shards.nbytes)}",
                f"staging evicts unused copies: they have {bytes_text(evictable)}",
                f"nothing; or choose what goes: shardio evict {shlex.quote(cache.path)} --keep SIZE",
            )
    if cache.filesystem in _MEMORY:
        left = f" of the {bytes_text(memory)} left" if memory is not None else ""
        yield Advice(
            "error" if memory is not None and shards.nbytes > memory else "warning",
            f"{cache.path} lies on {cache.filesystem}: a copy takes {bytes_text(shards.nbytes)} of memory{left}",
            "the job is killed when memory runs out, and the page cache would have held the set as well",
            "a cache on a disk, or no cache and shardio warm OUT",
        )


def _about_limits(machine: MachineFacts, shards: SetFacts) -> Iterator[Advice]:
    needed = shards.num_files + _MAPPINGS_FOR_OTHERS
    if machine.mappings is not None and shards.num_files and needed > machine.mappings:
        yield Advice(
            "error" if shards.num_files > machine.mappings else "warning",
            f"this process may map {machine.mappings:,} more files, the set has {shards.num_files:,}",
            "each shard is a mapping, and libraries make a thousand more: opening the set can fail (ENOMEM)",
            "sysctl -w vm.max_map_count=1048576, or convert with a larger --shard-size",
        )
    space = machine.address_space
    if space is not None and shards.nbytes + _ADDRESSES_FOR_OTHERS > space:
        yield Advice(
            "error" if shards.nbytes > space else "warning",
            f"the limit of address space (ulimit -v) is {bytes_text(space)}, the set has {bytes_text(shards.nbytes)}",
            "all of the set is mapped, which takes addresses and no memory: opening it can fail (ENOMEM)",
            "ulimit -v unlimited; limit memory by cgroups instead",
        )


def _about_machine(facts: MachineFacts) -> Iterator[Advice]:
    if facts.descriptors is not None and facts.descriptors < _ENOUGH_DESCRIPTORS:
        yield Advice(
            "warning",
            f"this process may open {facts.descriptors:,} files (ulimit -n)",
            "worker processes, sockets of torch.distributed and shards share them: some calls fail with EMFILE",
            "ulimit -n 65536, in the shell or the job's script",
        )
    yield from _about_cores(facts)
    yield from _about_libraries(facts)
    yield from _about_gpus(facts)
    for root in facts.lost_roots:
        yield Advice(
            "warning",
            f"SHARDIO_PATH names {root}, and no such folder is here",
            "sets in it are not found by their names",
            "mount it, or take it out of SHARDIO_PATH",
        )
    if facts.shm_free is not None and facts.shm_free < _ENOUGH_SHM:
        yield Advice(
            "hint",
            f"/dev/shm has {bytes_text(facts.shm_free)} free",
            "ShardLoader needs none; workers of a DataLoader around ShardDataset end with a bus error",
            "docker run --shm-size=1g (or --ipc=host)",
        )


def _about_cores(facts: MachineFacts) -> Iterator[Advice]:
    granted = facts.cores_granted
    if facts.cores < min(2, facts.cores_of_machine):
        yield Advice(
            "warning",
            f"this process may use {facts.cores} of {facts.cores_of_machine:,} cores",
            "the training loop and the loader's threads take turns, and converting has one worker",
            "sbatch --cpus-per-task=8, docker --cpus=8; taskset -pc $$ shows a binding",
        )
    elif granted is not None and granted < facts.cores:
        yield Advice(
            "hint",
            f"the scheduler grants {granted} cores and binds the job to {facts.cores}",
            "a loader and a conversion use more than was asked for, at the cost of other jobs",
            f"ShardLoader(..., num_threads={granted}), shardio convert --workers {granted}",
        )
    elif granted is not None and granted > facts.cores:
        yield Advice(
            "warning",
            f"the scheduler grants {granted} cores, and this process may use {facts.cores}",
            "what was asked for lies idle",
            "srun --cpu-bind=none, or srun --cpus-per-task=$SLURM_CPUS_PER_TASK",
        )


def _about_libraries(facts: MachineFacts) -> Iterator[Advice]:
    if facts.missing_kernels:
        found, _, cure = facts.missing_kernels.partition(". ")
        what, _, costs = found.partition(": ")
        yield Advice("warning", what, costs, cure)
    torch = facts.versions.get("torch", "")
    if not torch:
        yield Advice("error", "torch is not installed", "ShardLoader cannot be imported", "pip install torch")
    elif facts.torch_cuda and not facts.has_driver:
        yield Advice(
            "warning",
            f"torch {torch} is built for CUDA {facts.torch_cuda}, and there is no driver here",
            "training runs on the CPU; a machine that only converts needs no GPU",
            "docker run --gpus all, sbatch --gres=gpu:1, or install the driver; nvidia-smi shows it",
        )
    elif facts.has_driver and not facts.torch_cuda:
        yield Advice(
            "warning",
            f"a driver of NVIDIA is here, and torch {torch} is built without CUDA",
            "training runs on the CPU",
            "install a build of torch with CUDA: https://pytorch.org/get-started/locally",
        )
    elif facts.torch_sees_gpu is False:
        yield Advice(
            "warning",
            f"a driver of NVIDIA is here, and torch {torch} for CUDA {facts.torch_cuda} sees no GPU",
            "training runs on the CPU",
            "look at CUDA_VISIBLE_DEVICES, and whether nvidia-smi shows a CUDA version that is as new",
        )


def _about_gpus(facts: MachineFacts) -> Iterator[Advice]:
    for name, rate in facts.gpus.items():
        if rate < _SLOW_COPIES:
            yield Advice(
                "hint",
                f"copies from pinned memory to {name} reach {bytes_text(rate)}/s",
                f"at most {rate / (256 * 256 * 3):,.0f} samples of 256 x 256 a second get there",
                "look at the link (nvidia-smi -q -d PCIE), and whether the job's cores are on the GPU's NUMA node",
            )


def as_dict(found: Advice | MachineFacts | SetFacts | CacheFacts) -> dict[str, object]:
    """Returns a value of this module as JSON can hold it."""
    return dataclasses.asdict(found)


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
