"""LitData's optimize in processes, of raw pixels that Pillow has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictures import picture, sources

PACKAGES = ("litdata", "pillow")


def sample(source: tuple[str, int]) -> Any:
    return {"image": picture(Path(source[0])), "label": source[1]}


def write(images: Path, out: Path, workers: int) -> None:
    from litdata import optimize

    inputs = [(str(file), label) for file, label in sources(images)]
    optimize(sample, inputs, output_dir=str(out / "chunks"), num_workers=workers, chunk_bytes="64MB", verbose=False)


WAYS = {"LitData's optimize": write}
