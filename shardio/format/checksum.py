"""crc32 of a sample's bytes, as the index has it.

The same sums as zlib's at ten times the rate, 4 us instead of 46 for a sample of 196,608 bytes: so they can be compared
while training, too. Either releases the GIL for anything as large as a picture.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # a kind of processor that it has no wheels for
    from zlib import crc32

__all__ = ["crc32"]
