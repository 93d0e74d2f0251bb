"""The caller's own memory for batches: each one is written there, at the same addresses, which a CUDA graph reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WAY_OUT = "clones of the tensors of a first batch fit, taken without out="


def check_out(out: object) -> None:
    """Raises TypeError unless it is None, or a tuple or list, as a batch is one."""
    if out is not None and not isinstance(out, (tuple, list)):
        raise TypeError(f"out must be a tuple of tensors, as a batch is one: {_WAY_OUT}; found {_kind(out)}")


def write_batch(out: Any, batch: tuple[Any, ...], *, is_short: bool) -> tuple[Any, ...]:
    """Copies the tensors of a batch into those of `out`, on the current stream. Returns the batch made of these, or of
    their first rows if the batch `is_short`.

    `batch` is a tuple of tensors, of tuples (views of the pictures) and of dicts. Raises ValueError, and writes
    nothing, unless `out` has the same ones, and tensors of the same shape, dtype and device. Their memory format is the
    caller's choice.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    written: tuple[Any, ...] = _matched("out", out, batch, is_short, pairs)
    with torch.no_grad():  # they may be leaves whose gradient is wanted
        for target, tensor in pairs:
            target.copy_(tensor, non_blocking=True)
    return written


def _matched(name: str, out: Any, made: Any, is_short: bool, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Returns the part of `out` that takes `made`; adds the tensors of both to `pairs`."""
    if isinstance(made, torch.Tensor):
        if not isinstance(out, torch.Tensor):
            raise _mismatch(name, _kind(made), _kind(out))
        rows = out[: len(made)] if is_short and made.dim() and out.dim() else out
        if (rows.shape, rows.dtype, rows.device) != (made.shape, made.dtype, made.device):
            raise _mismatch(name, _kind(made), _kind(out))
        pairs.append((rows, made))
        return rows
    if isinstance(made, Mapping):
        if not isinstance(out, Mapping) or out.keys() != made.keys():
            raise _mismatch(name, _kind(made), _kind(out))
        return {key: _matched(f"{name}[{key!r}]", out[key], made[key], is_short, pairs) for key in made}
    if isinstance(made, (tuple, list)):
        if not isinstance(out, (tuple, list)) or len(out) != len(made):
            raise _mismatch(name, _kind(made), _kind(out))
        parts = zip(out, made, strict=True)
        return tuple([_matched(f"{name}[{i}]", *both, is_short, pairs) for i, both in enumerate(parts)])
    raise ValueError(f"{name}: only tensors can be written there; the transform has returned {_kind(made)}")


def _mismatch(name: str, expected: str, found: str) -> ValueError:
    return ValueError(f"{name}: expected {expected}, as in this batch; found {found}: {_WAY_OUT}")


def _kind(value: Any) -> str:
    """Returns what a part of a batch is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} on {value.device}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} parts ({', '.join(map(_kind, value))})"
    return f"{value!r:.80}"
