from typing import Any

def resample(
    images: Any,
    spans: Any,
    flips: Any,
    out: Any,
    affine: Any,
    height: int,
    width: int,
    channels: int,
    out_height: int,
    out_width: int,
    cubic: bool,
    antialias: bool,
    /,
) -> None: ...
