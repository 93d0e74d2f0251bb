"""`shardio info`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option
from shardio.cli.output import bytes_text, show, telling_of_servers

if TYPE_CHECKING:
    from shardio.format.manifest import Manifest


@click.command(short_help="Say what a set holds.")
@click.argument("out")
@json_option
def info(out: str, as_json: bool) -> None:
    """Say what the set in OUT is: splits, samples, shape, classes and what people call them, state, size, digest.

    OUT is a folder, a URL such as s3://bucket/name, or a name that is found in the roots of SHARDIO_PATH.
    """
    from shardio.sets.names import is_url
    from shardio.sets.storage import open_storage

    with telling_of_servers([out]):
        storage = open_storage(out if is_url(out) else Path(out))
        manifest = storage.load_manifest()
        fault = storage.find_fault(manifest)
    show((_facts if as_json else _summary)(storage.name, manifest, fault))


def _facts(name: str, manifest: Manifest, fault: str) -> dict[str, Any]:
    return {
        "path": name,
        "state": _state(fault),
        "reason": fault,
        "digest": manifest.digest,
        "sample_shape": list(manifest.sample_shape),
        "num_classes": len(manifest.classes),
        "class_names": list(manifest.class_names),
        "splits": {
            name: {"num_samples": split.num_samples, "num_shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
        "columns": {name: dict(split.index.columns) for name, split in manifest.splits.items()},
        "nbytes": manifest.nbytes,
        "num_rejects": manifest.rejects.num_rejects,
        "provenance": dict(manifest.provenance),
    }


def _summary(name: str, manifest: Manifest, fault: str) -> Iterator[str]:
    height, width, channels = manifest.sample_shape
    yield f"{name}: {bytes_text(manifest.nbytes)}, {len(manifest.classes):,} classes"
    yield f"  sample  {height} x {width} x {channels} uint8"
    if manifest.class_names:
        named = [f"{name} is {called}" for name, called in zip(manifest.classes, manifest.class_names, strict=True)]
        yield f"  names   {'; '.join(named[:3])}{'; ...' if len(named) > 3 else ''}"
    for name, split in manifest.splits.items():
        yield f"  {name:<8}{split.num_samples:,} samples in {len(split.shards):,} shards"
        if columns := ", ".join(column for column, _ in split.index.columns):
            yield f"          columns {columns}"
    yield f"  state   {_state(fault)}{fault and ': '}{fault}"
    yield f"  refused {manifest.rejects.num_rejects:,} images when it was made"
    yield f"  digest  {manifest.digest}"
    for name, value in _flat(manifest.provenance):
        yield f"  {name}: {value}"


def _state(fault: str) -> str:
    return "damaged" if fault else "published"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
