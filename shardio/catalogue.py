"""Which shard sets there are below some roots, folders or URLs, by their manifests and the sizes of their files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from shardio.errors import FormatError, SetNotFoundError
from shardio.format import WORK_FOLDER, SampleShape
from shardio.leftovers import LeftOver, find_left_overs
from shardio.places import is_url, join_place, without_credentials
from shardio.remote import RemoteStorage
from shardio.storage import FolderStorage

# Reading a manifest is waiting for a server, mostly.
_NUM_THREADS = 16

State = Literal["published", "damaged", "unfinished", "unreadable"]


@dataclass(frozen=True)
class CatalogueEntry:
    """A set in a root. What its manifest says is empty or 0 if there is none that can be read."""

    name: str
    path: str
    """For people to read: without the credentials of a URL."""
    state: State
    """"damaged": the manifest is not one, or a file is missing or has another size than the manifest says.

    "unfinished": a conversion without a manifest yet. An object store has none of these.
    """
    reason: str = ""
    """Why it is damaged or unreadable."""
    digest: str = ""
    sample_shape: SampleShape | tuple[()] = ()
    num_samples: Mapping[str, int] = field(default_factory=dict)
    """Of each split."""
    nbytes: int = 0


@dataclass(frozen=True)
class Listing:
    root: str
    sets: tuple[CatalogueEntry, ...]
    """By name."""
    problem: str = ""
    """Why the root could not be looked into."""
    left_overs: tuple[LeftOver, ...] = ()
    """What publishers have not finished here, or were killed at. An object store has none."""


def list_sets(roots: Sequence[str]) -> list[Listing]:
    """The sets that are children of these folders and URLs. What cannot be read is told of, and hides nothing else."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shardio-list") as pool:
        names = list(pool.map(_children, roots))
        left_overs = list(pool.map(_left_overs, roots))
        children = [
            [] if isinstance(found, str) else [pool.submit(_look_at, root, name) for name in found]
            for root, found in zip(roots, names, strict=True)
        ]
        return [
            Listing(
                root=without_credentials(root) if is_url(root) else root,
                sets=tuple(entry for child in entries if (entry := child.result()) is not None),
                problem=found if isinstance(found, str) else "",
                left_overs=left,
            )
            for root, found, entries, left in zip(roots, names, children, left_overs, strict=True)
        ]


def _children(root: str) -> list[str] | str:
    """The names of the folders in a root, or why they are not to be had."""
    try:
        if is_url(root):
            return RemoteStorage(root).list_folders()
        with os.scandir(root) as entries:
            # Hidden ones are the temporary folders of publishers.
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except (OSError, ValueError) as error:
        return str(error)


def _left_overs(root: str) -> tuple[LeftOver, ...]:
    if is_url(root):
        return ()
    try:
        return tuple(find_left_overs(root))
    except OSError:  # which `_children` tells
        return ()


def _look_at(root: str, name: str) -> CatalogueEntry | None:
    """None if it is no set."""
    place = join_place(root, name)
    path = without_credentials(place) if is_url(place) else place
    try:
        storage = RemoteStorage(place) if is_url(place) else FolderStorage(place)
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
    except SetNotFoundError:
        if not is_url(place) and os.path.isdir(os.path.join(place, WORK_FOLDER)):
            return CatalogueEntry(name, path, "unfinished")
        return None
    except FormatError as error:
        return CatalogueEntry(name, path, "damaged", str(error))
    except OSError as error:
        return CatalogueEntry(name, path, "unreadable", str(error))
    state: State = "damaged" if fault else "published"
    num_samples = {split: content.num_samples for split, content in manifest.splits.items()}
    return CatalogueEntry(
        name, path, state, fault, manifest.digest, manifest.sample_shape, num_samples, manifest.nbytes
    )
