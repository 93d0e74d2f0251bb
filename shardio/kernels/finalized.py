"""`Finalized`: the base of objects that clean up when they are freed, and must not lose a Ctrl-C that comes then."""

from __future__ import annotations

from shardio.kernels._finalized import Finalized

__all__ = ["Finalized"]
