"""`shardio demo`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from shardio.cli.convert import run_convert
from shardio.cli.info import info
from shardio.cli.options import folder, size_option
from shardio.cli.output import next_step, say
from shardio.errors import printable


@click.command(short_help="Convert, read and train on a folder of images.")
@click.argument("images", type=folder, required=False)
@click.option("--out", type=folder, help="Keep the set in this folder.  [default: a temporary folder]")
@click.option(
    "--elastic",
    is_flag=True,
    help="Train on 4 ranks, kill them, resume on 3 and then on 5, and compare every global batch with an uninterrupted "
    "run. Draws its own images.",
)
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: 300, with --elastic 45]")
@size_option
@click.pass_context
def demo(
    context: click.Context,
    images: Path | None,
    out: Path | None,
    elastic: bool,
    steps: int | None,
    size: tuple[int, int],
) -> None:
    """Convert a folder of IMAGES, read some epochs, and train a small network, on the GPU if there is one.

    Without --out, nothing is kept, and TMPDIR chooses the disk. --elastic trains on the CPU, and exits with 1 if a
    batch differs.
    """
    if (images is None) != elastic:
        found = "both" if elastic else "neither"
        raise click.UsageError(f"expected a folder of IMAGES, or --elastic, which draws images; found {found}")
    if is_temporary := out is None:
        out = Path(context.with_resource(tempfile.TemporaryDirectory(prefix="shardio-demo-")), "shards")
    if elastic:
        from shardio.cli.elastic import draw_set, run_elastic

        draw_set(out, size)
        run_elastic(out, steps or 45)
    else:
        from shardio.cli.demo_run import run_demo

        assert images is not None
        click.secho(printable(f"$ shardio convert {images} {out} --size {size[0]}x{size[1]}"), bold=True)
        run_convert(images, out, as_json=False, size=size)
        click.secho("\n" + printable(f"$ shardio info {out}"), bold=True)
        context.invoke(info, out=str(out), as_json=False)
        run_demo(out, steps or 300)
    if is_temporary:
        click.echo("\n" + printable(f"{out} is removed now; --out FOLDER keeps the set"))
    else:
        say(next_step("view", out))
