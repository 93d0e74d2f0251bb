"""`shardio list`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import folder, json_option
from shardio.cli.output import Column, say, show, table, telling_of_servers
from shardio.errors import bytes_text, printable

if TYPE_CHECKING:
    from shardio.cache.folder import CachedCopy
    from shardio.sets.catalogue import Listing


@click.command("list", short_help="Show which sets there are.")
@click.argument("roots", metavar="[ROOT]...", nargs=-1)
@click.option(
    "--cache",
    type=folder,
    envvar="SHARDIO_CACHE",
    show_envvar=True,
    help="Say which of them this cache of the machine has, and whether they are in use.",
)
@json_option
def list_sets(roots: Sequence[str], cache: Path | None, as_json: bool) -> None:
    """Show the sets in each ROOT, a folder or a URL: samples, shape, size, digest, and what state they are in.

    published: there is a manifest, and each file has the right size. damaged: a file is missing or has another size, or
    the manifest is not valid. unfinished: a conversion has not published its set yet. `shardio verify` also checks the
    bytes.

    Without a ROOT, the roots of SHARDIO_PATH are listed, in search order. Exit code 1 if a root cannot be read.
    """
    import shardio.sets.catalogue as catalogue
    from shardio.sets.names import catalogue_roots

    if not (roots := roots or catalogue_roots()):
        raise click.UsageError("expected a ROOT, or roots in SHARDIO_PATH with colons between them; found neither")
    with telling_of_servers(roots):
        listings = catalogue.list_sets(roots)
    copies = None if cache is None else {copy.digest: copy for copy in _copies_in(cache)}
    show((_facts if as_json else _summary)(listings, copies))
    problems = [listing for listing in listings if listing.problem]
    for listing in problems:
        say(f"shardio: error: {listing.root}: {listing.problem}", err=True)
    sys.exit(1 if problems else 0)


def _copies_in(cache: Path) -> list[CachedCopy]:
    from shardio.cache.folder import Cache

    return Cache(cache).copies() if cache.is_dir() else []  # the first `stage` makes the folder


def _facts(listings: Sequence[Listing], copies: Mapping[str, CachedCopy] | None) -> dict[str, Any]:
    roots = [dataclasses.asdict(listing) for listing in listings]
    for entry in (entry for root in roots for entry in root["sets"]):
        copy = copies and copies.get(entry["digest"])
        entry["cached"] = copy and dataclasses.asdict(copy)
    return {"roots": roots}


def _summary(listings: Sequence[Listing], copies: Mapping[str, CachedCopy] | None) -> Iterator[str]:
    """The table says whether sets are cached only if --cache is given, and their root only if there are several."""
    found = [(listing, entry) for listing in listings for entry in listing.sets]
    columns = [
        Column("name", [printable(entry.name) for _, entry in found]),
        Column("samples", [", ".join(f"{s} {n:,}" for s, n in entry.num_samples.items()) for _, entry in found]),
        Column("shape", [" x ".join(map(str, entry.sample_shape)) for _, entry in found]),
        Column("size", [bytes_text(entry.nbytes) if entry.digest else "" for _, entry in found]),
        Column("digest", [entry.digest[:12] for _, entry in found]),
        Column("state", [entry.state for _, entry in found]),
    ]
    if copies is not None:
        columns.append(Column("cached", [_cached(copies.get(entry.digest)) for _, entry in found]))
    if len(listings) > 1:
        columns.append(Column("root", [printable(listing.root) for listing, _ in found]))
    yield from table(columns)
    for _, entry in found:
        if entry.reason:
            yield f"{entry.state}: {entry.reason}"
    for copy in (copies or {}).values():
        if copy.problem:
            yield f"cached: {copy.problem}"
    for left in (left for listing in listings for left in listing.left_overs):
        whose = (
            "the next `shardio publish` there removes it, if it may" if left.abandoned else "a publisher may be at work"
        )
        yield f"left over: {left.path}: {bytes_text(left.nbytes)}; {whose}"


def _cached(copy: CachedCopy | None) -> str:
    """Says whether the cache has a copy of a set, and how many processes use it."""
    if copy is None:
        return "no"
    users = f", in use by {len(copy.processes)}" if copy.processes else ", in use" if copy.in_use else ""
    return ("yes" if copy.complete else "unfinished") + users
