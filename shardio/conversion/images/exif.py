"""The way up in which a picture is to be shown, as its Exif block says (Exif 2.32, in the layout of TIFF 6.0).

A broken block is ignored, as viewers do: the people who chose the picture never saw that it had one.
"""

from __future__ import annotations

from typing import Literal

UPRIGHT = 1

_ORIENTATION = 0x0112
_SHORT = 3
_ENTRY_NBYTES = 12
_BYTE_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}


def read_orientation(block: bytes) -> int:
    """Returns 1 to 8, as the first directory of an Exif block says; 1 (upright) if it is broken or does not say."""
    tiff = block.removeprefix(b"Exif\0\0")
    if tiff[:4] not in _BYTE_ORDERS:
        return UPRIGHT
    byte_order = _BYTE_ORDERS[tiff[:4]]

    def number(start: int, nbytes: int) -> int:
        return int.from_bytes(tiff[start : start + nbytes], byte_order)

    directory = number(4, 4)
    first = directory + 2
    for entry in range(first, first + number(directory, 2) * _ENTRY_NBYTES, _ENTRY_NBYTES):
        if entry + _ENTRY_NBYTES > len(tiff):
            break
        if number(entry, 2) == _ORIENTATION:
            value = number(entry + 8, 2)
            sound = number(entry + 2, 2) == _SHORT and number(entry + 4, 4) == 1 and 1 <= value <= 8
            return value if sound else UPRIGHT
    return UPRIGHT
