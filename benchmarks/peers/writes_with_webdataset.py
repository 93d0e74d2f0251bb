"""WebDataset's ShardWriter in processes, each with tars of its own, of raw pixels that Pillow has made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pictures import Source, in_processes, picture

PACKAGES = ("webdataset", "pillow")


def fill(part: list[Source], out: Path, number: int) -> None:
    import webdataset

    with webdataset.ShardWriter(str(out / f"samples-{number}-%05d.tar"), maxcount=500, verbose=0) as writer:
        for place, (file, label) in enumerate(part):
            writer.write({"__key__": f"{number}-{place:08d}", "pixels": picture(file).tobytes(), "cls": label})


WAYS = {"WebDataset's ShardWriter": partial(in_processes, fill)}
