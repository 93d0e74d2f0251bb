"""MosaicML's MDSWriter in processes, each with a folder of its own, of raw pixels that Pillow has made; one index."""

from __future__ import annotations

from pathlib import Path

from pictures import SIDE, Source, in_processes, picture

PACKAGES = ("mosaicml-streaming", "pillow")


def fill(part: list[Source], out: Path, number: int) -> None:
    from run import import_what_torch_lacks

    import_what_torch_lacks()
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:{SIDE},{SIDE},3", "label": "int"}
    with MDSWriter(out=str(out / str(number)), columns=columns) as writer:
        for file, label in part:
            writer.write({"image": picture(file), "label": label})


def write(images: Path, out: Path, workers: int) -> None:
    from streaming.base.util import merge_index

    in_processes(fill, images, out, workers)
    merge_index(str(out))


WAYS = {"MosaicML's MDSWriter": write}
