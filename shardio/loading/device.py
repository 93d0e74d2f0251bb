"""The device of a loader: chosen, and the copier to it."""

from __future__ import annotations

import torch

from shardio.loading.prefetch import Copier
from shardio.loading.world import World


def choose_device(device: str | torch.device | None, world: World) -> torch.device:
    """Returns the device that was asked for; without one the GPU of the local rank, or the CPU if there is no GPU.

    Raises ValueError if torch does not see it.
    """
    if device is not None:
        chosen = _checked(device)
    elif torch.cuda.is_available():
        chosen = torch.device("cuda")  # the current one, if nothing says which is this rank's
        if world.local_rank is not None:
            chosen = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _checked(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N"; found {device!r}') from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f'device must be a CPU or a CUDA device; found {chosen}: with device="cpu", batches can be moved there'
        )
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        # torch makes other numbers of those that do not fit into eight bits.
        if not 0 <= (chosen.index or 0) < count or (isinstance(device, str) and str(chosen) != device):
            seen = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise ValueError(
                f"device: expected one that torch {torch.__version__} sees here, {seen}; found {device!r}. Look at "
                "CUDA_VISIBLE_DEVICES, the driver and the build of torch; device=None is a GPU where there is one, or "
                "else the CPU"
            )
    return chosen


def make_copier(device: torch.device) -> Copier | None:
    """Returns what copies batches to the device; None for the CPU."""
    if device.type == "cpu":
        return None
    from shardio.loading.cuda import CudaCopier

    return CudaCopier(device)
