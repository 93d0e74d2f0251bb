"""crc32 of a sample's bytes, as in the index.

zlib-ng computes the same sums as zlib ten times as fast, 4 us instead of 46 for a sample of 196,608 bytes, so training
can compare them too. Both release the GIL for anything as large as a picture.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # no wheels for this kind of processor
    from zlib import crc32

__all__ = ["crc32"]
