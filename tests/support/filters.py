"""The resampling filters that the installed torch has: older ones lack lanczos."""

from __future__ import annotations

import contextlib
from typing import get_args

from shardio.conversion.images.fit import Fit, Resample

RESAMPLES: list[Resample] = []
for _name in get_args(Resample):
    with contextlib.suppress(ValueError):
        RESAMPLES.append(Fit((4, 4), resample=_name).resample)
