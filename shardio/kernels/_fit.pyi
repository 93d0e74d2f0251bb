from typing import Any

AVAILABLE: bool

def fit(
    pixels: Any,
    out: Any,
    size: tuple[int, int],
    out_size: tuple[int, int],
    resized_size: tuple[int, int],
    place: tuple[int, int],
    scales: tuple[float, float],
    cubic: bool,
    /,
) -> None: ...
