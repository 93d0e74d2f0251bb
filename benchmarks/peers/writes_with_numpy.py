"""Processes that decode and resize by Pillow, and write into a mapped file each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from pictures import SIDE, Source, in_processes, picture

PACKAGES = ("numpy", "pillow")


def fill(part: list[Source], out: Path, number: int) -> None:
    pixels = np.lib.format.open_memmap(out / f"pixels-{number}.npy", "w+", np.uint8, (len(part), SIDE, SIDE, 3))
    for place, (file, _) in enumerate(part):
        pixels[place] = picture(file)
    np.save(out / f"labels-{number}.npy", [label for _, label in part])


WAYS = {"Pillow into numpy.memmap": partial(in_processes, fill)}
