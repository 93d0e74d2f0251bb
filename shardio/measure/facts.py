"""Gathers the facts for `shardio doctor`: about the machine, a set, and a folder for caching.

Nothing is changed: whether a folder can be written to and has locks is tried on a file without a name.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shardio.cache.folder import MARKER_NAME, Cache
from shardio.errors import ShardioError
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import load_manifest
from shardio.kernels.built import kernels_in_use, missing_kernels
from shardio.measure.advice import CacheFacts, MachineFacts, SetFacts
from shardio.reading.choose import look_at
from shardio.reading.shardset import ShardSet
from shardio.sets.names import catalogue_roots, find_folder, is_url, shown
from shardio.sets.storage import FolderStorage
from shardio.system.files import try_lock
from shardio.system.machine import PROC, filesystem_kind, is_network, is_shared, memory_left, usable_cores
from shardio.system.opening import open_file
from shardio.version import __version__

T = TypeVar("T")

_LIBRARIES = ("torch", "numpy", "pillow", "simplejpeg")
_SHM = "/dev/shm"
_SYSFS = Path("/sys")
# What schedulers call the cores of one task: SLURM, and PBS.
_GRANTED = ("SLURM_CPUS_PER_TASK", "NCPUS")
ANSWER_SECONDS = 60.0
"""A filesystem that is silent for so long is taken for one that is gone."""
_READING_SECONDS = 1.0
_COPYING_SECONDS = 0.5


def within(seconds: float, what: str, look: Callable[[], T]) -> T:
    """Returns look(). Raises TimeoutError if it takes longer: a call into a filesystem whose server is gone cannot be
    ended, so that it is left to a thread that dies with the process."""
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
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} seconds: is its server away?", what)
    return results[0]


def look_at_machine(proc: Path = PROC, environ: Mapping[str, str] = os.environ) -> MachineFacts:
    cuda, has_driver = _torch_cuda(), (proc / "driver" / "nvidia" / "version").exists()
    sees_gpu = _torch_sees_gpu() if cuda and has_driver else None
    return MachineFacts(
        cores=usable_cores(),
        cores_of_machine=os.cpu_count() or 1,
        cores_granted=_granted(environ),
        memory_left=memory_left(),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        mappings=_mappings_left(proc),
        address_space=_limit(resource.RLIMIT_AS),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        shm_free=_free(_SHM),
        huge_pages=_huge_pages(),
        numa_nodes=max(1, len(list((_SYSFS / "devices" / "system" / "node").glob("node[0-9]*")))),
        kernels=kernels_in_use(),
        missing_kernels=missing_kernels(),
        versions={
            "shardio": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
        torch_cuda=cuda,
        has_driver=has_driver,
        torch_sees_gpu=sees_gpu,
        gpus=_pinned_rates() if sees_gpu else {},
        lost_roots=tuple(root for root in catalogue_roots() if not is_url(root) and not os.path.isdir(root)),
    )


def look_at_set(out: str, *, reads: bool = True) -> SetFacts:
    """Looks at the set in the folder `out`, or of that name in the catalogue. `reads` has the disk's rate measured, for
    a second, where not all of the set is in the page cache."""
    try:
        folder = find_folder(out)
    except ShardioError as error:
        return SetFacts(shown(out), "", None, fault=str(error))
    facts = SetFacts(folder, filesystem_kind(folder), _free(folder))
    try:
        manifest = load_manifest(Path(folder))
        files = sum(len(split.files) for split in manifest.splits.values())
        facts = replace(facts, digest=manifest.digest, num_files=files, nbytes=manifest.nbytes)
        with closing(FolderStorage(folder)) as storage:
            if fault := storage.find_fault(manifest):
                return replace(facts, fault=fault)
        return _look_at_reading(facts, manifest, reads)
    except (ShardioError, OSError) as error:
        return replace(facts, fault=str(error))


def _look_at_reading(facts: SetFacts, manifest: Manifest, reads: bool) -> SetFacts:
    split = max(manifest.splits, key=lambda name: manifest.splits[name].num_samples)
    shards = ShardSet(Path(facts.path), manifest, split)
    reading = look_at(shards, len(shards))
    facts = replace(facts, split=split, reading=reading)
    if reads and reading.resident_share != 1.0 and not is_network(facts.filesystem):
        facts = replace(facts, reads_per_second=_reads_per_second(shards))
    return facts


def _reads_per_second(shards: ShardSet) -> float | None:
    from shardio.measure.limits import direct_reads, why_no_direct_reads  # imports torch

    if why_no_direct_reads(shards):
        return None
    nbytes = shards.pixels.row_nbytes
    with closing(direct_reads(shards, seed=0)) as steps:
        next(steps)  # opens the files
        count, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < _READING_SECONDS:
            count += next(steps)
    return count * nbytes / seconds


def look_at_cache(folder: str) -> CacheFacts:
    """Looks at a folder that is a cache, or shall become one."""
    if is_url(folder):
        folder = shown(folder)
        return CacheFacts(folder, "", f"{folder}: expected a folder on a disk of this machine, found a URL")
    cache = Cache(folder)
    there = next(path for path in (cache.folder, *cache.folder.parents) if os.path.lexists(path))
    facts = CacheFacts(str(cache.folder), filesystem_kind(there), free_nbytes=_free(there))
    try:
        facts = replace(facts, has_locks=_try_writing(there))
        is_cache = (cache.folder / MARKER_NAME).exists()
        if not is_cache and is_shared(facts.filesystem):
            return replace(facts, problem=f"{there}: expected a disk of this machine, found {facts.filesystem}")
        if there != cache.folder or (not is_cache and not os.listdir(there)):
            return facts  # `stage` makes it
        copies = cache.copies()
        return replace(
            facts,
            evictable_nbytes=sum(
                copy.nbytes_alone for copy in copies if not copy.in_use and cache.may_remove(copy.digest)
            ),
            complete=tuple(copy.digest for copy in copies if copy.complete),
        )
    except (ShardioError, OSError) as error:
        return replace(facts, problem=str(error))


def _try_writing(folder: Path) -> bool | None:
    """Returns whether files in the folder can be locked; None if that is unknown. Raises OSError if none can be made
    there."""
    try:
        file = open_file(folder, os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        # Not all filesystems have files without names: then permissions tell.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR) or not folder.is_dir():
            raise
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder)) from None
        return None
    with file:
        return try_lock(file.fileno()) is not None


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


def _huge_pages() -> str:
    with contextlib.suppress(OSError, IndexError):
        text = (_SYSFS / "kernel" / "mm" / "transparent_hugepage" / "enabled").read_text()
        return text.split("[")[1].split("]")[0]
    return ""


def _granted(environ: Mapping[str, str]) -> int | None:
    found = (environ.get(name, "") for name in _GRANTED)
    return next((int(text) for text in found if re.fullmatch("[1-9][0-9]{0,5}", text)), None)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_cuda() -> str:
    """Returns the version of CUDA that torch was built for, without the second that importing it takes."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError):
            text = Path(folder, "version.py").read_text(errors="replace")
            found = re.search(r"^cuda\b[^=\n]*= *'([0-9.]+)'", text, re.MULTILINE)
            return found[1] if found else ""
    return ""


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _pinned_rates() -> dict[str, float]:
    """Returns the bytes a second that copies to each GPU reach, by its name."""
    import torch

    from shardio.measure.limits import pinned_copies

    rates = {}
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        steps = pinned_copies(device, 256, 256 * 256 * 3)
        next(steps)  # starts the driver
        start, images = time.perf_counter(), 0
        while time.perf_counter() - start < _COPYING_SECONDS:
            images += next(steps)
        rates[f"{device} ({torch.cuda.get_device_name(device)})"] = (
            images * 256 * 256 * 3 / (time.perf_counter() - start)
        )
    return rates
