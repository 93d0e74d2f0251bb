"""`shardio doctor`: finds problems of this machine that would end a job, or make it run on the wrong device.

`look_at_machine`, `look_at_set` and `look_at_cache` collect facts and change nothing; `advise` uses these facts only,
so tests can invent any machine. Problems that only slow a job are found by `shardio bench` and `loader.report()`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from shardio.cache.folder import MARKER_NAME, Cache
from shardio.errors import ShardioError, bytes_text
from shardio.format.manifest_file import load_manifest
from shardio.kernels.built import kernels_in_use, missing_kernels
from shardio.sets.names import find_folder, is_url, shown
from shardio.sets.storage import FolderStorage
from shardio.system.files import try_lock
from shardio.system.machine import PROC, filesystem_kind, is_shared, memory_left, usable_cores
from shardio.system.opening import open_file
from shardio.version import __version__

T = TypeVar("T")

_LIBRARIES = ("torch", "numpy", "pillow", "simplejpeg")
_ANSWER_SECONDS = 60.0
# torch, a launcher and the libraries for a GPU have hundreds of files and sockets open.
_MIN_DESCRIPTORS = 1024
# A process with torch has about a thousand mappings: four or five of each library.
_MAPPINGS_OF_OTHERS = 2000
# Address space: torch with CUDA reserves much more than it uses.
_ADDRESSES_OF_OTHERS = 16 << 30
# A container has 64 MiB by default, less than a few batches of a DataLoader's workers.
_MIN_SHM = 128 << 20
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Advice:
    """A problem and its cure. An error ends every job, a warning some jobs.

    `found` has the measured figure, `cure` a command or a setting.
    """

    severity: Literal["error", "warning"]
    found: str
    consequence: str
    cure: str


@dataclass(frozen=True)
class MachineState:
    """The resources of the machine that this process may use: sizes in bytes. None means unknown or unlimited."""

    cores: int
    cores_of_machine: int
    memory_left: int | None
    descriptors: int | None
    """How many files may be open."""
    mappings_left: int | None
    """How many more files may be mapped."""
    address_space: int | None
    shm_free: int | None
    kernels: Mapping[str, str]
    missing_kernels: str
    versions: Mapping[str, str]
    """Versions of Python and the libraries; "" for a library that is not installed."""
    has_driver: bool
    """Whether the kernel has NVIDIA's driver."""
    torch_cuda: str
    """The version of CUDA that torch was built for; "" for none."""
    sees_gpu: bool


@dataclass(frozen=True)
class SetState:
    """The state of a set that a job will read. `fault` says why it cannot be read; "" if it can."""

    path: str
    filesystem: str = ""
    fault: str = ""
    digest: str = ""
    num_files: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class CacheState:
    """The state of a folder for copies of sets. `fault` says why it cannot be a cache; "" if it can."""

    path: str
    filesystem: str = ""
    fault: str = ""
    free_nbytes: int | None = None
    evictable_nbytes: int = 0
    """Bytes of the copies that no process uses."""
    complete: tuple[str, ...] = ()
    """The digests of the sets that have a complete copy in the cache."""


def advise(
    machine: MachineState | None = None, shards: SetState | None = None, cache: CacheState | None = None
) -> list[Advice]:
    """Returns the problems that would end a job or make it run on the wrong device, errors first."""
    found: list[Advice] = []
    if shards is not None:
        found += _about_set(shards)
    if cache is not None:
        found += _about_cache(cache)
    if machine is not None and shards is not None:
        found += _about_limits(machine, shards)
    if shards is not None and cache is not None and not cache.fault and shards.digest not in cache.complete:
        found += _about_room(cache, shards, machine.memory_left if machine else None)
    if machine is not None:
        found += _about_machine(machine)
    return sorted(found, key=lambda advice: advice.severity)


def _about_set(shards: SetState) -> Iterator[Advice]:
    if shards.fault:
        stage, verify = (shlex.join(["shardio", command, shards.path]) for command in ("stage", "verify"))
        cure = f"{stage} CACHE" if is_url(shards.path) else f"{verify} says how to repair it"
        yield Advice("error", shards.fault, "no job can read the set", cure)


def _about_cache(cache: CacheState) -> Iterator[Advice]:
    if cache.fault:
        yield Advice(
            "error", cache.fault, "no set can be staged there", "name a writable folder on a local disk (ext4, xfs)"
        )


def _about_room(cache: CacheState, shards: SetState, memory: int | None) -> Iterator[Advice]:
    if cache.filesystem in _MEMORY_FILESYSTEMS and memory is not None and shards.nbytes > memory:
        yield Advice(
            "error",
            f"{cache.path} is on {cache.filesystem}: a copy takes {bytes_text(shards.nbytes)} of the "
            f"{bytes_text(memory)} of memory left",
            "the job is killed when memory runs out",
            "put the cache on a disk, or use none: the page cache keeps the set as well",
        )
    elif cache.free_nbytes is not None and shards.nbytes > cache.free_nbytes + cache.evictable_nbytes:
        yield Advice(
            "error",
            f"{cache.path} has {bytes_text(cache.free_nbytes)} free and {bytes_text(cache.evictable_nbytes)} in unused "
            f"copies, but the set takes {bytes_text(shards.nbytes)}",
            "the set cannot be staged there",
            "use a larger disk, make room on this one, or read the set in place, without cache=",
        )


def _about_limits(machine: MachineState, shards: SetState) -> Iterator[Advice]:
    mappings, space = machine.mappings_left, machine.address_space
    if mappings is not None and shards.num_files and shards.num_files + _MAPPINGS_OF_OTHERS > mappings:
        yield Advice(
            "error" if shards.num_files > mappings else "warning",
            f"this process may map {mappings:,} more files, and the set has {shards.num_files:,}",
            "opening the set can fail with ENOMEM: each file is a mapping, and libraries make a thousand more",
            "sysctl -w vm.max_map_count=1048576, or convert with a larger --shard-size",
        )
    if space is not None and shards.nbytes + _ADDRESSES_OF_OTHERS > space:
        yield Advice(
            "error" if shards.nbytes > space else "warning",
            f"the address space is limited to {bytes_text(space)} (ulimit -v), and the set has "
            f"{bytes_text(shards.nbytes)}",
            "opening the set can fail with ENOMEM: it is mapped, which takes addresses but no memory",
            "ulimit -v unlimited; limit memory by cgroups instead",
        )


def _about_machine(machine: MachineState) -> Iterator[Advice]:
    if machine.descriptors is not None and machine.descriptors < _MIN_DESCRIPTORS:
        yield Advice(
            "warning",
            f"this process may open {machine.descriptors:,} files (ulimit -n)",
            "jobs can fail with EMFILE: workers, sockets of torch.distributed and shards share the limit",
            "ulimit -n 65536, in the shell or in the job's script",
        )
    if machine.shm_free is not None and machine.shm_free < _MIN_SHM:
        yield Advice(
            "warning",
            f"/dev/shm has {bytes_text(machine.shm_free)} free",
            "a DataLoader's workers around ShardDataset die with a bus error; ShardLoader needs none of it",
            "docker run --shm-size=1g, or --ipc=host",
        )
    if machine.missing_kernels:
        found, _, cure = machine.missing_kernels.partition(". ")
        found, _, consequence = found.partition(": ")
        yield Advice("warning", found, consequence, cure)
    torch = f"torch {machine.versions.get('torch')}"
    if machine.has_driver and not machine.sees_gpu:
        built = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "built without CUDA"
        yield Advice(
            "warning",
            f"NVIDIA's driver is here, but {torch}, {built}, sees no GPU",
            "training runs on the CPU",
            "check CUDA_VISIBLE_DEVICES, and install a torch for a CUDA no newer than nvidia-smi shows",
        )
    elif machine.torch_cuda and not machine.has_driver:
        yield Advice(
            "warning",
            f"{torch} is built for CUDA {machine.torch_cuda}, but NVIDIA's driver is not here",
            "training runs on the CPU; a machine that only converts needs no GPU",
            "docker run --gpus all, sbatch --gres=gpu:1, or install the driver",
        )


def within(what: str, look: Callable[[], T], seconds: float = _ANSWER_SECONDS) -> T:
    """Returns look(). Raises TimeoutError, which names `what`, if it takes longer than `seconds`.

    A call into a filesystem whose server does not answer cannot be ended. So `look` runs in a thread that ends with the
    process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(look())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="shardio-look", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} seconds: is its server down?", what)
    return results[0]


def look_at_machine(proc: Path = PROC) -> MachineState:
    """Returns the limits of this process, the versions of libraries, and whether torch sees a GPU."""
    import torch

    return MachineState(
        cores=usable_cores(),
        cores_of_machine=os.cpu_count() or 1,
        memory_left=memory_left(),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        mappings_left=_mappings_left(proc),
        address_space=_limit(resource.RLIMIT_AS),
        shm_free=_free("/dev/shm"),
        kernels=kernels_in_use(),
        missing_kernels=missing_kernels(),
        versions={
            "shardio": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
        has_driver=(proc / "driver" / "nvidia" / "version").exists(),
        torch_cuda=torch.version.cuda or "",
        sees_gpu=torch.cuda.is_available(),
    )


def look_at_set(out: str) -> SetState:
    """Returns the state of the set in the folder `out`, or with this name in the catalogue."""
    try:
        folder = find_folder(out)
    except ShardioError as error:
        return SetState(shown(out), fault=str(error))
    state = SetState(folder, filesystem_kind(folder))
    try:
        manifest = load_manifest(Path(folder))
        files = sum(len(split.files) for split in manifest.splits.values())
        state = replace(state, digest=manifest.digest, num_files=files, nbytes=manifest.nbytes)
        with closing(FolderStorage(folder)) as storage:
            return replace(state, fault=storage.find_fault(manifest))
    except (ShardioError, OSError) as error:
        return replace(state, fault=str(error))


def look_at_cache(folder: str) -> CacheState:
    """Returns the state of a folder that is a cache, or is to become a cache."""
    if is_url(folder):
        folder = shown(folder)
        return CacheState(folder, fault=f"{folder}: expected a folder on a disk of this machine, found a URL")
    cache = Cache(folder)
    existing = next(path for path in (cache.folder, *cache.folder.parents) if os.path.lexists(path))
    state = CacheState(str(cache.folder), filesystem_kind(existing), free_nbytes=_free(existing))
    if is_shared(state.filesystem):
        # Other machines need not see its locks.
        return replace(state, fault=f"{existing}: expected a disk of this machine, found {state.filesystem}")
    try:
        _try_writing(existing)
        is_cache = (cache.folder / MARKER_NAME).exists()
        if existing != cache.folder or (not is_cache and not os.listdir(existing)):
            return state  # `stage` makes it
        copies = cache.copies()
    except (ShardioError, OSError) as error:
        return replace(state, fault=str(error))
    evictable = sum(copy.nbytes_alone for copy in copies if not copy.in_use and cache.may_remove(copy.digest))
    return replace(state, evictable_nbytes=evictable, complete=tuple(copy.digest for copy in copies if copy.complete))


def _try_writing(folder: Path) -> None:
    """Raises OSError if files cannot be created in the folder, or cannot be locked."""
    try:
        file = open_file(folder, os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        # Some filesystems have no files without names. There permissions have to do.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR) or not folder.is_dir():
            raise
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder)) from None
        return
    with file:
        if try_lock(file.fileno()) is None:
            raise OSError(errno.ENOLCK, "its filesystem refuses flock, which protects copies in use", str(folder))


def _free(path: str | Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _mappings_left(proc: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        most = int((proc / "sys" / "vm" / "max_map_count").read_text())
        return max(0, most - len((proc / "self" / "maps").read_bytes().splitlines()))
    return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
