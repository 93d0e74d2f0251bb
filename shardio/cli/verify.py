"""`shardio verify`."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardio.cli.options import json_option, parsed, set_argument, workers_option
from shardio.cli.output import next_step, say, show
from shardio.system.amounts import bytes_text, counted

if TYPE_CHECKING:
    from shardio.sets.verify import VerifyReport


def parse_share(text: str) -> float:
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("a share such as 5% or 0.05, more than 0 and at most 100%")
    return share


@click.command(short_help="Check a set against its checksums.")
@set_argument
@click.option("--quick", is_flag=True, help="Check only sizes and headers, which takes no time.")
@click.option(
    "--subset",
    callback=parsed(parse_share),
    metavar="P%",
    help="Read only this share of the samples in the shards, at random: for routine checks of large sets.",
)
@click.option(
    "--seed", type=click.IntRange(0, (1 << 64) - 1), help="Seed of the subset.  [default: a new one, printed]"
)
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
    show({**dataclasses.asdict(report), "ok": report.ok} if as_json else _summary(report, out, quick))
    if not as_json:
        say(next_step("bench", out) if report.ok else next_step("repair", out, "SRC"))
    sys.exit(0 if report.ok else 1)


def _summary(report: VerifyReport, out: Path, quick: bool) -> Iterator[str]:
    for problem in report.problems:
        yield f"damaged: {problem.detail}"
    what = "sizes and headers" if quick else "every checksum"
    if report.subset is not None:
        values = f" and {report.subset.num_values:,} values of arrays" if report.subset.num_values else ""
        samples = counted(report.subset.num_samples, "sample")
        what = f"{samples}{values} (seed {report.subset.seed}), sizes, headers and indexes"
    verdict = "intact" if report.ok else f"{len(report.problems)} damaged"
    yield f"{out}: {verdict}: {what} of {counted(report.num_files, 'file')}, {bytes_text(report.nbytes)}"
