"""The sources that a collection lists."""

from __future__ import annotations

from shardio.conversion.sources.collection import Collection


def rows(found: Collection, split: str = "train") -> list[tuple[bytes, int]]:
    return [(source.key, source.label) for source in found.splits[split]]


def keys(collection: Collection) -> dict[str, list[bytes]]:
    return {split: [source.key for source in sources] for split, sources in collection.splits.items()}
