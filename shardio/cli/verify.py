"""`shardio verify` and `shardio repair`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import (
    convert_options,
    folder,
    json_option,
    parse_share,
    parsed,
    random_seed,
    set_argument,
    table_options,
    with_tables,
    workers_option,
)
from shardio.cli.output import next_step, show
from shardio.errors import bytes_text, counted

if TYPE_CHECKING:
    from shardio.sets.verify import VerifyReport


# --- verify -----------------------------------------------------------------------------------------------------------


@click.command(short_help="Check a set against its checksums.")
@set_argument
@click.option("--quick", is_flag=True, help="Check sizes, headers, labels and orders, but no pixels.")
@click.option(
    "--subset",
    callback=parsed(parse_share),
    metavar="P%",
    help="Read only this share of the samples in the shards, at random: for routine checks of large sets.",
)
@click.option("--seed", type=random_seed, help="Seed of the subset.  [default: random, printed]")
@click.option("--digest", metavar="HEX", help="Digest that the set must have, or its first 12 digits or more.")
@workers_option("Files to read at a time.", default=2)
@json_option
def verify(out: Path, quick: bool, as_json: bool, **options: Any) -> None:
    """Check the set in OUT against its checksums, and name every damaged file and sample.

    Exit code 1 if anything is damaged.
    """
    import shardio.sets.verify as verifier
    from shardio.system.progress import BytesBar

    with BytesBar(shown=not quick) as bar:
        report = verifier.verify(out, quick=quick, on_progress=bar.add, **options)
    show({**dataclasses.asdict(report), "ok": report.ok} if as_json else _verdict(report, out, quick))
    sys.exit(0 if report.ok else 1)


def _way_out(report: VerifyReport, out: Path) -> Iterator[str]:
    """Yields lines on how to repair a damaged set. `shardio repair` is suggested only for sets made by `convert`."""
    from shardio.format.layout import MANIFEST_NAME
    from shardio.format.manifest_file import load_manifest

    if any(problem.file == MANIFEST_NAME for problem in report.problems):
        yield "no command repairs a manifest: copy the right set here, or convert again"
        return
    provenance = load_manifest(out).provenance
    if "conversion" in provenance:
        yield next_step("repair", out, "SRC")
        return
    if "change" in provenance:
        yield "the set was made from other sets: verify and repair the others, then make it again"
    else:
        yield "`convert` did not make the set: copy it again, or write it again"
    yield next_step("info", "-v", out)


def _verdict(report: VerifyReport, out: Path, quick: bool) -> Iterator[str]:
    for problem in report.problems:
        yield f"damaged: {problem.detail}"
    what = "sizes, headers, labels and orders" if quick else "every checksum"
    if report.subset is not None:
        samples = counted(report.subset.num_samples, "sample")
        values = f"{report.subset.num_values:,} values of arrays"
        some = [*([samples] if report.subset.num_samples else []), *([values] if report.subset.num_values else [])]
        what = f"{' and '.join(some)} (seed {report.subset.seed}), sizes, headers and indexes"
    verdict = "intact" if report.ok else f"{len(report.problems)} damaged"
    yield f"{out}: {verdict}: {what} of {counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}"
    yield from [next_step("bench", out)] if report.ok else _way_out(report, out)


# --- repair -----------------------------------------------------------------------------------------------------------


@click.command(short_help="Make damaged files of a set again.")
@set_argument
@click.argument("src", type=folder)
@convert_options("source", "masks", "workers")
@table_options
@json_option
def repair(out: Path, src: Path, as_json: bool, **options: Any) -> None:
    """Make the damaged files of OUT again from SRC, the images that OUT was converted from.

    Reads all of OUT to find damaged files. A new file replaces a damaged file only if it has the checksum in the
    manifest. Exit code 1 if a file comes out different because images or libraries have changed. Arrays from a table
    need the table (--table, --column), and masks need their files (--masks).
    """
    import shardio.conversion.repair as repairer
    from shardio.system.progress import Bar, BytesBar

    with BytesBar(desc="verify") as read, Bar(unit=" images", desc="repair") as made:
        source, options = with_tables(src, **options)
        report = repairer.repair(out, source, on_verify=read.add, on_progress=made.reach, **options)
    lines = [f"repaired: {out / file}" for file in report.repaired]
    lines += [f"{out}: intact, {counted(len(report.repaired), 'file')} repaired", next_step("verify", out)]
    show(report if as_json else lines)
