"""Publishes a set from finished shards: indexes, rejects, manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.entries import ArrayEntry, RejectsEntry, ShardEntry, SplitEntry
from shardio.format.layout import HEADER_NBYTES, REJECTS_NAME, SampleShape
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest
from shardio.sets.rows import write_index
from shardio.system.files import write_atomic
from shardio.system.opening import read_untrusted


@dataclass(frozen=True)
class Reject:
    """A source that was refused: a line of rejects.jsonl."""

    split: str
    key: bytes
    reason: str
    detail: str

    def to_line(self) -> bytes:
        """Returns the line, ASCII JSON. Bytes of the key that are not UTF-8 become lone surrogates, as from
        `os.fsdecode`."""
        return (json.dumps({**asdict(self), "key": os.fsdecode(self.key)}) + "\n").encode("ascii")


def read_rejects(path: Path | None) -> list[Reject]:
    """Returns the refused sources in a rejects.jsonl, or none without a path. Raises FormatError with the number of the
    first invalid line."""
    rejects = []
    for number, line in enumerate(read_untrusted(path).splitlines() if path else (), start=1):
        try:
            fields = json.loads(line)
            split, key, reason, detail = (fields[name] for name in ("split", "key", "reason", "detail"))
            if not all(isinstance(text, str) for text in (split, key, reason, detail)):
                raise TypeError
            rejects.append(Reject(split, os.fsencode(key), reason, detail))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FormatError(
                f"{path}: line {number}: expected a JSON object with split, key, reason and detail, found "
                f"{line[:80]!r}; `shardio verify` lists all damage, and `shardio repair` makes the file again"
            ) from None
    return rejects


@dataclass(frozen=True)
class SplitContent:
    """The finished shards of one split and their index rows, both in order, and the split's finished arrays."""

    shards: Sequence[ShardEntry]
    rows: NDArray[np.void]
    arrays: Mapping[str, ArrayEntry] = field(default_factory=dict)
    squashed: bool = False


def samples_per_shard(shard_nbytes: int, sample_nbytes: int) -> int:
    return max(1, (shard_nbytes - HEADER_NBYTES) // sample_nbytes)


def _write_rejects(folder: Path, rejects: Iterable[Reject]) -> RejectsEntry | None:
    lines = [reject.to_line() for reject in rejects]
    if not lines:
        (folder / REJECTS_NAME).unlink(missing_ok=True)  # of an earlier call, which ended with too many
        return None
    data = b"".join(lines)
    write_atomic(folder / REJECTS_NAME, data)
    return RejectsEntry(REJECTS_NAME, len(data), hashlib.sha256(data).hexdigest(), len(lines))


def publish_set(
    folder: Path,
    sample_shape: SampleShape | None,
    classes: Sequence[str],
    splits: Mapping[str, SplitContent],
    rejects: Iterable[Reject],
    provenance: Mapping[str, Any],
    class_names: Sequence[str] = (),
) -> Manifest:
    """Writes the indexes, rejects.jsonl if there are any, and the manifest, which publishes the set and is returned."""
    manifest = Manifest(
        sample_shape=sample_shape,
        classes=tuple(classes),
        splits={
            name: SplitEntry(
                len(content.rows),
                write_index(folder, name, content.rows),
                tuple(content.shards),
                arrays=dict(content.arrays),
                squashed=content.squashed,
            )
            for name, content in splits.items()
        },
        rejects=_write_rejects(folder, rejects),
        provenance=provenance,
        class_names=tuple(class_names),
    )
    commit_manifest(folder, manifest)
    return manifest
