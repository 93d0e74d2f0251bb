"""`stage` makes a verified copy of a set in a cache, once, however many processes ask for it at the same time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardio.cache.filler import CopyFiller
from shardio.cache.folder import Cache
from shardio.cache.leases import CopyPaths, Lease
from shardio.cache.meeting import Meeting
from shardio.errors import CacheError, FormatError, SetNotFoundError, first_of
from shardio.format.layout import MANIFEST_NAME
from shardio.format.manifest import Manifest
from shardio.format.parse import is_digest
from shardio.sets.names import hinting_at_order
from shardio.sets.storage import Storage, open_storage


@dataclass(frozen=True)
class StageReport:
    path: str
    """The folder of the copy."""
    source: str
    digest: str
    num_files: int
    nbytes: int
    """The size of all files except the manifest."""
    num_copied: int
    """How many files this call has copied. The others were there, or another process has copied them."""
    nbytes_copied: int
    evicted: tuple[str, ...]
    """The digests of copies that were removed to make room."""
    seconds: float
    num_linked: int = 0
    """How many files this call has linked from other copies in the cache."""
    nbytes_linked: int = 0


def stage(
    src: str | os.PathLike[str],
    cache: str | os.PathLike[str],
    *,
    digest: str | None = None,
    workers: int = 4,
    verify: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_wait: Callable[[int | None], None] | None = None,
    together: Meeting | None = None,
    on_message: Callable[[str], object] = lambda text: None,
) -> StageReport:
    """Copies the set `src` (a folder or URL) into the folder `cache`, verifies it, and returns a StageReport.

    An existing copy is checked as `shardio verify --quick` does, or read completely with `verify`. Damaged files are
    copied again. Unused copies are evicted to make room, least recently used first. The new copy itself may be evicted
    once `stage` has returned: see `Cache.lease`. After an error, finished files are kept for the next call.

    - `digest` pins the set. If its copy is complete, the source is not read.
    - `workers`: how many files are copied at a time.
    - `on_progress` is called in the worker threads with (bytes since the last call, total bytes).
    - `on_wait` is called once if another process is copying, with its process id, or None if unknown.
    - `together`: the Meeting of a job's ranks. One rank per node copies, and each byte is read from the source once.
    - `on_message` is called with a sentence for each evicted copy, and when a node no longer takes part.

    Raises SetNotFoundError, FormatError or OSError for the source; CacheError if `cache` is no cache; or SpaceError.
    """
    start = time.perf_counter()
    storage = open_storage(src)
    with hinting_at_order(cache, "SRC, the set, comes first, and CACHE second"):
        lease, manifest = take_lease(storage, Cache(cache), digest)
    with contextlib.closing(storage), lease:
        if os.path.realpath(storage.name) == os.path.realpath(str(lease.path)):
            raise CacheError(f"{storage.name}: is the copy in this cache itself: expected the set that it is a copy of")
        filler = CopyFiller(
            storage,
            manifest,
            lease,
            workers=workers,
            verify=verify,
            on_progress=on_progress,
            on_wait=on_wait,
            meeting=together,
            on_message=on_message,
        )
        filler.run()
    for copy in filler.evicted:
        on_message(f"removed the copy of {copy} from {cache}, to make room")
    return StageReport(
        path=str(lease.path),
        source=storage.name,
        digest=manifest.digest,
        num_files=len(filler.files),
        nbytes=manifest.nbytes,
        num_copied=len(filler.copied),
        nbytes_copied=sum(entry.nbytes for entry in filler.copied),
        evicted=tuple(copy.digest for copy in filler.evicted),
        seconds=time.perf_counter() - start,
        num_linked=len(filler.linked),
        nbytes_linked=sum(entry.nbytes for entry in filler.linked),
    )


def take_lease(storage: Storage, cache: Cache, digest: str | None = None) -> tuple[Lease, Manifest]:
    """Returns a lease on the copy of the set in `storage`, and the set's manifest. The copy need not exist yet.

    The storage is not read if the copy named by `digest`, or by its first digits, is complete. Raises the errors of
    `load_manifest` and `Cache.lease`.
    """
    if digest is not None and len(digest) >= 12:
        found = [path.name for path in cache.folder.glob("*") if path.name.startswith(digest) and is_digest(path.name)]
        digest = found[0] if len(found) == 1 else digest
    if digest is None or not is_digest(digest):
        try:
            manifest = storage.load_manifest(digest)
        except (SetNotFoundError, FormatError) as error:
            places = storage.name, os.path.abspath(storage.name)
            complete = [path.parent.name for path in cache.folder.glob(f"*/{MANIFEST_NAME}")]
            copies = [name[:12] for name in complete if CopyPaths(cache.folder, name).source() in places]
            if digest is not None or not copies:
                raise
            hint = f"{cache.folder} has a complete copy of the set that was there: digest={first_of(copies, 3, repr)}"
            raise type(error)(f"{error}. {hint} reads it") from None
        return cache.lease(manifest.digest), manifest
    with contextlib.ExitStack() as stack:
        lease = stack.enter_context(cache.lease(digest))
        manifest = lease.manifest() or storage.load_manifest(digest)
        stack.pop_all()
    return lease, manifest
