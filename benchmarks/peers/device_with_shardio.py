"""shardio's own loader, which hands out batches on the GPU."""

from __future__ import annotations

from functools import partial

import torch
from with_shardio import PACKAGES, loader, prepare

__all__ = ["PACKAGES", "WAYS", "prepare"]

if not torch.cuda.is_available():
    raise RuntimeError("it needs CUDA")

WAYS = {"ShardLoader": partial(loader, device="cuda")}
