"""Small kernels of PTX for tests of the emulator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ptx.machine import run
from ptx.memory import GlobalMemory
from ptx.registers import dtype_of

_NUM_THREADS = 64
# What the registers of a test are called: by their width, in bytes.
_PREFIXES = {2: "%rs", 4: "%r", 8: "%rd"}
_HEAD = """
.version 8.7
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    {parameters}
)
.reqntid {threads}
{{
    .reg .pred %p<10>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
"""


def launched(
    body: str,
    *buffers: NDArray[Any],
    num_blocks: int = 1,
    num_threads: int = _NUM_THREADS,
    shared_nbytes: int = 0,
    division_seed: int | None = None,
) -> list[NDArray[Any]]:
    """Runs a kernel with the addresses of buffers in %rd90, %rd91, ... Returns the buffers after that."""
    names = [f"kernel_param_{number}" for number in range(len(buffers))]
    text = _HEAD.format(
        parameters=",\n    ".join(f".param .u64 .ptr .global .align 1 {n}" for n in names), threads=num_threads
    )
    text += "".join(f"    ld.param.b64 %rd{90 + number}, [{name}];\n" for number, name in enumerate(names))
    memory = GlobalMemory([buffer.reshape(-1).view(np.uint8) for buffer in buffers])
    arguments = memory.addresses.tolist()
    run(
        f"{text}{body}\n    ret;\n}}\n",
        memory,
        arguments,
        num_blocks,
        shared_nbytes=shared_nbytes,
        division_seed=division_seed,
    )
    return [memory.contents(i).view(buffer.dtype).reshape(buffer.shape) for i, buffer in enumerate(buffers)]


def executed(
    body: str, given: Sequence[NDArray[Any]], types: Sequence[str], made: str, division_seed: int | None = None
) -> NDArray[Any]:
    """Returns register `d` of each thread after `body`, in which `a`, `b` and `c` have the values given.

    There is a thread for each value. `types` are those of `given`, `made` is that of `d`.
    """
    result = dtype_of(made)
    count = -(-len(given[0]) // _NUM_THREADS) * _NUM_THREADS
    buffers = [np.resize(values, count) for values in given] + [np.zeros(count, result)]
    names = {
        name: f"{_PREFIXES[dtype_of(kind).itemsize]}{70 + i}"
        for i, (name, kind) in enumerate(zip("abc", types, strict=False))
    }
    names["d"] = f"{_PREFIXES[result.itemsize]}80"
    lines = ["mov.u32 %r60, %ctaid.x; mov.u32 %r61, %tid.x; mad.lo.s32 %r62, %r60, 64, %r61;"]
    for number, values in enumerate(buffers):
        lines.append(f"mad.wide.s32 %rd{60 + number}, %r62, {values.itemsize}, %rd{90 + number};")
    for number, name in enumerate("abc"[: len(given)]):
        lines.append(f"ld.global.b{8 * buffers[number].itemsize} {names[name]}, [%rd{60 + number}];")
    lines.append(re.sub(r"(?<![\w.%])([abcd])(?!\w)", lambda match: names[match[1]], body))
    lines.append(f"st.global.b{8 * result.itemsize} [%rd{60 + len(given)}], {names['d']};")
    after = launched("\n".join(lines), *buffers, num_blocks=count // _NUM_THREADS, division_seed=division_seed)
    return after[-1][: len(given[0])]
