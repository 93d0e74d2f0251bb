"""Launches Triton kernels on the CPU: compiled for a GPU that is not here, and their PTX executed on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from ptx.machine import run
from ptx.memory import GlobalMemory
from ptx.program import Program, parse
from shardio.augment import resample_cuda, steps_cuda

KERNELS = (resample_cuda.weigh, resample_cuda.resample, steps_cuda.measure, steps_cuda.blur_lines, steps_cuda.step)


@dataclass
class Emulator:
    """Stands in for Triton's driver, which needs a GPU. `num_launches` counts launches.

    For `division_seed` see `ptx.arithmetic.operation_of`.
    """

    capability: int
    division_seed: int | None = None
    num_launches: int = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def launch(
        self, kernel: Any, run_by_triton: Callable[..., Any], *arguments: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        """Executes a kernel of these arguments, which are tensors and integers, in place of its own `run`."""
        made = run_by_triton(*arguments, grid=grid, warmup=True, **options)  # only compiles
        passed = [
            argument
            for name, argument in zip(kernel.arg_names, arguments, strict=False)
            if made.src.signature.get(name, "constexpr") != "constexpr" and name not in made.src.constants
        ]
        tensors = [argument for argument in passed if isinstance(argument, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): _bytes_of(tensor) for tensor in tensors}
        memory = GlobalMemory(list(storages.values()))
        addresses = dict(zip(storages, memory.addresses.tolist(), strict=True))

        def value_of(argument: Any) -> int:
            if not isinstance(argument, torch.Tensor):
                return int(argument)
            start = argument.untyped_storage().data_ptr()
            return addresses[start] + argument.data_ptr() - start

        program = _parsed(made.asm["ptx"])
        values = [value_of(argument) for argument in passed]
        values += [0] * (len(program.parameters) - len(values))  # room that these kernels do not use
        run(
            program,
            memory,
            values,
            grid[0],
            shared_nbytes=made.metadata.shared,
            division_seed=self.division_seed,
        )
        for number, storage in enumerate(storages.values()):
            storage[:] = memory.contents(number)
        self.num_launches += 1


def emulate(capability: int, *, assemble: bool = False) -> Emulator:
    """Has launches of all kernels of this package, in this process, executed by the emulator that is returned.

    Unless they are to be assembled, too, they are compiled up to their PTX. So Triton's cache must not be the one that
    others use.
    """
    emulator = Emulator(capability)
    triton.runtime.driver.set_active(emulator)
    add_stages = CUDABackend.add_stages

    def add_stages_up_to_ptx(self: CUDABackend, stages: dict[str, Any], *how: Any) -> None:
        add_stages(self, stages, *how)
        stages["cubin"] = lambda ptx, metadata: b""

    if not assemble:
        CUDABackend.add_stages = add_stages_up_to_ptx
    for kernel in KERNELS:
        kernel.run = partial(emulator.launch, kernel, kernel.run)
    return emulator


_parsed: Callable[[str], Program] = lru_cache(maxsize=None)(parse)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns all of the memory that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return np.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)
