from typing import Any

FORMS: tuple[str, ...]

def resample(
    pixels: Any,
    places: Any,
    stride: int,
    halved: bool,
    windows: Any,
    axes: Any,
    flags: Any,
    lines: Any,
    out: Any,
    affine: Any,
    channels: int,
    resized: tuple[int, int],
    first: tuple[int, int],
    size: tuple[int, int],
    antialias: bool,
    depth: int,
    form: int,
    /,
) -> int: ...
def to_yuv420(images: Any, out: Any, height: int, width: int, form: int, /) -> None: ...
