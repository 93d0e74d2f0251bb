from typing import Any

KERNELS: list[str]

def copy(
    rows: Any,
    row_nbytes: int,
    numbers: Any,
    starts: Any,
    pieces: int,
    piece_nbytes: int,
    stride: int,
    out: Any,
    kernel: int,
    /,
) -> int: ...
