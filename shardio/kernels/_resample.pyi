from typing import Any

def resample(
    pixels: Any,
    windows: Any,
    spans: Any,
    flips: Any,
    out: Any,
    affine: Any,
    channels: int,
    out_height: int,
    out_width: int,
    cubic: bool,
    antialias: bool,
    /,
) -> None: ...
