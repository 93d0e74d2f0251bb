from typing import Any

KERNELS: list[str]
BEST: str

def copy(
    rows: Any,
    row_nbytes: int,
    numbers: Any,
    starts: Any,
    pieces: Any,
    piece_nbytes: Any,
    stride: int,
    places: Any,
    out: Any,
    kernel: int,
    /,
) -> int: ...
