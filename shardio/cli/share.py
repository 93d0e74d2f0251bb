"""The commands `shardio publish`, `list`, `stage` and `evict`: shared sets, and their copies on local disks."""

from __future__ import annotations

import dataclasses
import os
import resource
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import folder, json_option, parse_nbytes, parsed, path_text, set_argument, workers_option
from shardio.cli.output import counts_text, next_step, say, show, table, telling_of_servers
from shardio.errors import bytes_text, counted, first_of, printable

if TYPE_CHECKING:
    from shardio.cache.folder import CachedCopy, EvictReport
    from shardio.sets.catalogue import RootContent
    from shardio.sets.publish import PublishReport


@click.command(short_help="Copy or move a set into a shared root.")
@set_argument
@click.argument("target", metavar="ROOT/NAME", type=folder)
@click.option(
    "--move", is_flag=True, help="Move OUT instead of copying it: by a rename, if ROOT is on the same filesystem."
)
@workers_option("Files to copy at a time.", default=2)
@json_option
def publish(out: Path, target: Path, as_json: bool, **options: Any) -> None:
    """Copy the finished set in OUT into the folder ROOT, as NAME, for others to read.

    NAME appears whole or not at all, and never replaces anything. Copies are compared with their checksums; a set that
    is moved by a rename is checked as by `verify --quick`. Permissions and group are the same as for new files in ROOT.
    """
    import shardio.sets.publish as publisher
    from shardio.system.progress import BytesBar

    with BytesBar() as bar:
        report = publisher.publish(out, target, on_progress=bar.add, **options)
    show(report if as_json else _published(report, "moved" if options["move"] else "copied"))


def _published(report: PublishReport, done: str) -> Iterator[str]:
    yield f"{done} {counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}, digest {report.digest[:16]}"
    yield f"  published as {report.path}"
    if report.readable_by != "all":
        whom = {"owner": "its owner", "group": "its owner and group"}[report.readable_by]
        chmod = f"`chmod -R a+rX {shlex.quote(report.path)}` lets everyone read it"
        yield f"  only {whom} can read it, because of the umask: {chmod}"
    yield next_step("list", Path(report.path).parent)


@click.command("list", short_help="List the sets in a folder.")
@click.argument("roots", metavar="[DIR]...", nargs=-1, type=path_text)
@click.option(
    "--cache",
    type=folder,
    envvar="SHARDIO_CACHE",
    show_envvar=True,
    help="Also show which of the sets this cache has a copy of, and whether the copy is in use.",
)
@json_option
def list_sets(roots: Sequence[str], cache: Path | None, as_json: bool) -> None:
    """Show the sets in each DIR, a folder or a URL: samples, shape, size, digest, and state.

    published: there is a manifest, and each file has the right size. damaged: a file is missing or has another size, or
    the manifest is not valid. unfinished: a conversion has not published its set yet. `shardio verify` also checks the
    bytes.

    Without a DIR, the current folder is listed. Exit code 1 if a DIR cannot be read.
    """
    import shardio.sets.catalogue as catalogue

    roots = roots or ["."]
    with telling_of_servers(roots):
        listings = catalogue.list_sets(roots)
    copies = None
    if cache is not None:
        from shardio.cache.folder import Cache

        # The first `stage` makes the folder.
        copies = {copy.digest: copy for copy in (Cache(cache).copies() if cache.is_dir() else [])}
    show((_listed_facts if as_json else _listed)(listings, copies))
    problems = [listing for listing in listings if listing.problem]
    for listing in problems:
        say(f"shardio: error: {listing.root}: {listing.problem}", err=True)
    sys.exit(1 if problems else 0)


def _listed_facts(listings: Sequence[RootContent], copies: Mapping[str, CachedCopy] | None) -> dict[str, Any]:
    roots = [dataclasses.asdict(listing) for listing in listings]
    for entry in (entry for root in roots for entry in root["sets"]):
        copy = copies and copies.get(entry["digest"])
        entry["cached"] = copy and dataclasses.asdict(copy)
    return {"roots": roots}


def _listed(listings: Sequence[RootContent], copies: Mapping[str, CachedCopy] | None) -> Iterator[str]:
    """Yields the lines of a table of the sets, and their problems. `copies` are the copies in the cache by digest; if
    they are given, the table says which sets have a copy."""
    found = [(listing, entry) for listing in listings for entry in listing.sets]
    columns: dict[str, list[str]] = {
        "name": [printable(entry.name) for _, entry in found],
        "samples": [counts_text(entry.num_samples) for _, entry in found],
        "shape": [" x ".join(map(str, entry.sample_shape)) or (entry.digest and "arrays") for _, entry in found],
        "size": [bytes_text(entry.nbytes) if entry.digest else "" for _, entry in found],
        "digest": [entry.digest[:12] for _, entry in found],
        "state": [entry.state for _, entry in found],
    }
    if copies is not None:
        columns["cached"] = [_cached(copies.get(entry.digest), entry.path) for _, entry in found]
    if len(listings) > 1:
        columns["root"] = [printable(listing.root) for listing, _ in found]
    if found:
        yield from table(columns)
    for listing in listings:
        if not (listing.sets or listing.problem):
            yield f"{printable(listing.root)}: no set"
    for _, entry in found:
        if entry.reason:
            yield f"{entry.state}: {entry.reason}"
    for copy in (copies or {}).values():
        if copy.problem:
            yield f"cached: {copy.problem}"
    for left in (left for listing in listings for left in listing.left_overs):
        whose = (
            "the next `shardio publish` there tries to remove it" if left.abandoned else "a publisher may be writing it"
        )
        yield f"left over: {left.path}: {bytes_text(left.nbytes)}; {whose}"


def _cached(copy: CachedCopy | None, place: str) -> str:
    """Returns in words whether the cache has a copy of a set, how many processes use it, and its source if that is not
    the set's `place`: sets of the same pixels have one copy."""
    if copy is None:
        return "no"
    users = f", in use by {len(copy.processes)}" if copy.processes else ", in use" if copy.in_use else ""
    if copy.source not in ("", place, os.path.abspath(place)):
        users += f", copied from {printable(copy.source)}"
    state = "yes" if copy.complete else "unfinished" if copy.readable else f"only {copy.owner} may read it"
    return state + users


@click.command(short_help="Copy a set to a node's own disk.")
@click.argument("src", type=path_text)
@click.argument("cache", type=folder)
@click.option("--digest", metavar="HEX", help="Expected digest of the set at SRC, or at least its first 12 digits.")
@workers_option("Number of files to copy at a time.", default=4)
@click.option("--verify", is_flag=True, help="Read all of an existing copy, and copy damaged files again.")
@click.option("--together", is_flag=True, help="Read SRC once for all nodes of the job: run the command on each node.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Address where the nodes meet.  [default: from the launcher]")
@json_option
def stage(src: str, cache: Path, as_json: bool, together: bool, rendezvous: str | None, **options: Any) -> None:
    """Copy the set at SRC, a folder or URL, into the folder CACHE, verify the copy, and print its path.

    If several processes of a node stage the same set, one process copies it and the others wait. If that process is
    interrupted or killed, another process resumes the copy. Unused copies are evicted to make room, least recently
    used first. The copy may be evicted once the command has ended, unless a job uses it.

    With --together, started by srun, mpiexec or torchrun with one process on each node, the nodes read SRC once and
    pass the bytes on to each other. They meet at HOST:PORT of rank 0; or at MASTER_ADDR and MASTER_PORT; or at the
    first host of the SLURM step.
    """
    import shardio.cache.stage as staging
    from shardio.sets.names import shown
    from shardio.system.progress import BytesBar

    def tell(text: str) -> None:
        say(f"shardio: {text}", err=True)

    def tell_wait(process: int | None) -> None:
        who = "another process" if process is None else f"process {process}"
        tell(f"{who} is copying {shown(src)} to {cache}: waiting for it")

    meeting = None
    if rendezvous is not None and not together:
        raise click.UsageError("--rendezvous is only for --together: give --together, or leave --rendezvous out")
    if together:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # it logs, too, what is told below
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # gloo's copies in memory would keep all cores waiting
        from shardio.cache.meeting import Meeting
        from shardio.loading.world import find_world, rendezvous_of

        world = find_world()
        if world.world_size > 1:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # all ranks, and any stranger, connect to rank 0
            meeting = Meeting.at(rendezvous_of(rendezvous), world.rank, world.world_size, tell)
        else:
            tell("--together: found no launcher with several processes, so this node copies alone")

    # The delay hides the bar until something is copied, and for ever if another process copies.
    with BytesBar(delay=1e-3) as bar:
        try:
            report = staging.stage(
                src, cache, on_progress=bar.add, on_wait=tell_wait, together=meeting, on_message=tell, **options
            )
        except KeyboardInterrupt:
            bar.close()
            tell(f"finished files are kept in {cache}: the same command resumes the copy")
            raise
    if as_json:
        show(report)
        return
    if options["verify"]:
        tell(f"verified all {counted(report.num_files, 'file')}, {report.num_copied:,} of them copied")
    # A script gets the path unchanged. It may have any bytes.
    click.echo(printable(report.path) if sys.stdout.isatty() else os.fsencode(report.path))


@click.command(short_help="Remove unused copies from a cache.")
@click.argument("cache", type=folder, envvar="SHARDIO_CACHE")
@click.option(
    "--keep",
    callback=parsed(parse_nbytes),
    metavar="SIZE",
    required=True,
    help="Maximum total size of the remaining copies, such as 500GB; 0 for none.",
)
@json_option
def evict(cache: Path, keep: int, as_json: bool) -> None:
    """Remove copies from CACHE, least recently used first, until the remaining copies take at most SIZE.

    Without CACHE, the environment variable SHARDIO_CACHE names it. A copy that a job uses is never removed, nor is
    anything beside the copies. The folder of a copy is removed with all that is in it.
    """
    from shardio.cache.folder import Cache

    report = Cache(cache).evict(keep=keep)
    show(report if as_json else _evicted(report, cache))


def _evicted(report: EvictReport, cache: Path) -> Iterator[str]:
    for copy in report.removed:
        yield f"removed the copy of {copy}"
    for copy in report.kept:
        why = copy.problem or ("in use" if copy.in_use else f"only {copy.owner} or root may remove it")
        if copy.processes:
            why += f" by process {first_of(copy.processes, 16)}"
        yield f"kept the copy of {copy}: {why}"
    unknown = sum(not copy.readable for copy in report.kept)
    more = f", and {counted(unknown, 'copy')} of unknown size" if unknown else ""
    yield f"{cache}: {bytes_text(report.nbytes)} of copies remain{more}"
