"""Lists the shard sets in roots (folders or URLs) from their manifests and the sizes of their files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from shardio.errors import FormatError, SetNotFoundError
from shardio.format.layout import WORK_FOLDER, SampleShape
from shardio.sets.names import is_url, join_place, resolve, shown
from shardio.sets.new_folder import LeftOver, find_left_overs
from shardio.sets.storage import open_storage
from shardio.system.threads import Flag, ThreadPool

# Reading a manifest is waiting for a server, mostly.
_NUM_THREADS = 16

A = TypeVar("A")
B = TypeVar("B")

State = Literal["published", "damaged", "unfinished", "unreadable"]


@dataclass(frozen=True)
class CatalogueEntry:
    """A set in a root. Fields from the manifest are empty or 0 if the manifest is missing or unreadable."""

    name: str
    path: str
    """The set's folder or URL, for messages: without the credentials of a URL."""
    state: State
    """"damaged": the manifest is invalid, or a file is missing or has the wrong size. "unreadable": see `reason`.

    "unfinished": a conversion that has not written a manifest yet, which is not detected in an object store.
    """
    reason: str = ""
    """Why the set is damaged or unreadable."""
    digest: str = ""
    sample_shape: SampleShape | tuple[()] = ()
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """The number of samples of each split."""
    nbytes: int = 0


@dataclass(frozen=True)
class RootContent:
    root: str
    sets: tuple[CatalogueEntry, ...]
    """Sorted by name."""
    problem: str = ""
    """Why the root could not be listed; "" if it could."""
    left_overs: tuple[LeftOver, ...] = ()
    """Temporary folders of publishers, running or killed. An object store has none."""


def list_sets(roots: Sequence[str]) -> list[RootContent]:
    """Returns the content of each of `roots`, folders or URLs: the sets directly below it.

    If a root cannot be read, its result has no sets, and the reason as its `problem`.
    """
    return _map(_list, [resolve(root) for root in roots])


def _list(root: str) -> RootContent:
    try:
        names = open_storage(root).list_folders()
        left_overs = () if is_url(root) else tuple(find_left_overs(root))
    except (OSError, ValueError) as error:
        return RootContent(shown(root), (), str(error))
    is_silent = Flag()
    entries = _map(lambda name: _look_at(root, name, is_silent), names)
    return RootContent(shown(root), tuple(entry for entry in entries if entry is not None), left_overs=left_overs)


def _map(call: Callable[[A], B], arguments: Sequence[A]) -> list[B]:
    """Returns the result of `call` for each argument. A Ctrl-C does not wait for servers that are slow to answer."""
    pool = ThreadPool(_NUM_THREADS, "shardio-list")
    try:
        found = list(pool.map(call, arguments))
        pool.close()
        return found
    finally:
        del pool  # which ends it; an error that is kept would keep it


def _look_at(root: str, name: str, is_silent: Flag) -> CatalogueEntry | None:
    """Returns the entry of the folder `name` in a root; None if the folder is not a set.

    Sets `is_silent` if the root's server does not answer within the time limit. Once it is set, reads nothing.
    """
    place = join_place(root, name)
    path = shown(place)
    if is_silent.is_set():
        return CatalogueEntry(name, path, "unreadable", "not read: the server did not answer in time for another set")
    try:
        storage = open_storage(place)
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
    except SetNotFoundError:
        if not is_url(place) and os.path.isdir(os.path.join(place, WORK_FOLDER)):
            return CatalogueEntry(name, path, "unfinished")
        return None
    except FormatError as error:
        return CatalogueEntry(name, path, "damaged", str(error))
    except OSError as error:
        if error.errno == errno.ETIMEDOUT:
            is_silent.set()
        return CatalogueEntry(name, path, "unreadable", str(error))
    state: State = "damaged" if fault else "published"
    num_samples = {split: content.num_samples for split, content in manifest.splits.items()}
    return CatalogueEntry(
        name, path, state, fault, manifest.digest, manifest.sample_shape or (), num_samples, manifest.nbytes
    )
