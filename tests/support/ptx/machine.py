"""Runs a kernel of PTX: which threads execute which instruction, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import BrokenBarrier, EmulationError, UnknownInstruction
from ptx.instructions import ALL, Action, Binder
from ptx.memory import GlobalMemory, SharedMemory
from ptx.program import Instruction, Program, parse
from ptx.registers import Lanes, Registers

_WARP = 32
# Threads that are executed at once, in whole blocks. More need more memory, fewer more calls of NumPy.
_MOST_THREADS = 8192


def run(
    ptx: str | Program,
    memory: GlobalMemory,
    arguments: Sequence[int],
    num_blocks: int,
    *,
    shared_nbytes: int = 0,
    division_seed: int | None = None,
) -> None:
    """Executes all blocks of a one-dimensional grid.

    `arguments` are integers, in the order of the kernel's parameters. For `division_seed` see `operation_of`.
    """
    program = parse(ptx) if isinstance(ptx, str) else ptx
    at_once = max(_MOST_THREADS // program.num_threads, 1)
    with np.errstate(all="ignore"):
        for first in range(0, num_blocks, at_once):
            blocks = range(first, min(first + at_once, num_blocks))
            _Blocks(program, blocks, num_blocks, shared_nbytes, memory).run(arguments, division_seed)


class _Blocks:
    """The threads of some blocks of a launch."""

    def __init__(
        self, program: Program, chosen: range, num_blocks: int, shared_nbytes: int, memory: GlobalMemory
    ) -> None:
        self._instructions, self._labels = program.instructions, program.labels
        self._program, self._num_blocks = program, len(chosen)
        self._count = program.num_threads * len(chosen)
        blocks, threads = np.divmod(np.arange(self._count), program.num_threads)
        special = dict.fromkeys(("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"), np.zeros(self._count, np.int64))
        special |= {"%tid.x": threads, "%laneid": threads % _WARP, "%ctaid.x": blocks + chosen.start}
        special |= {"%ntid.x": np.full_like(threads, program.num_threads)}
        special |= {"%nctaid.x": np.full_like(threads, num_blocks)}
        registers: dict[str, NDArray[Any]] = {name: values.astype(np.uint32) for name, values in special.items()}
        if program.local is not None:
            name, nbytes = program.local
            room = -(-nbytes // 16) * 16
            registers[name] = (memory.add(room * self._count) + room * np.arange(self._count)).astype(np.uint64)
        self._memory, self._registers = memory, Registers(program, self._count, registers)
        self._shared = SharedMemory(shared_nbytes, blocks, threads // _WARP)
        # The next instruction of each thread, and whether it waits at the barrier before that one.
        self._next = np.zeros(self._count, np.int64)
        self._waits = np.zeros(self._count, bool)
        self._at = 0

    def run(self, arguments: Sequence[int], division_seed: int | None) -> None:
        parameters = dict(zip(self._program.parameters, arguments, strict=True))
        self._binder = Binder(self._registers, self._memory, self._shared, parameters, division_seed)
        self._actions: list[Action | None] = [None] * len(self._instructions)
        while True:
            ready = (self._next < len(self._instructions)) & ~self._waits
            if not ready.any():
                return
            at = int(self._next[ready].min())
            lanes: Lanes = np.flatnonzero(ready & (self._next == at))
            try:
                self._run_straight(at, ALL if len(lanes) == self._count else lanes)
            except EmulationError as error:
                raise type(error)(f"{error}: {self._instructions[self._at].text}") from None

    def _run_straight(self, at: int, lanes: Lanes) -> None:
        """Executes instructions up to one that decides where threads continue, or one where others may join them."""
        while at < len(self._instructions):
            self._at, instruction = at, self._instructions[at]
            if instruction.name in ("bra", "brx", "ret"):
                self._branch(instruction, lanes)
                return
            if instruction.name in ("bar", "barrier") and instruction.modifiers == ("sync",):
                self._next[lanes] = at + 1
                self._wait(instruction, lanes)
                return
            action = self._actions[at]
            if action is None:
                action = self._actions[at] = self._binder.bind(instruction)
            action(lanes)
            at += 1
            if at in self._labels and lanes is not ALL:
                break
        self._next[lanes] = at

    def _branch(self, instruction: Instruction, lanes: Lanes) -> None:
        if instruction.name == "brx":
            numbers = self._registers.getter(instruction.operands[0], np.uint32)(lanes)
            targets: Any = np.array(instruction.targets)[numbers]
        else:
            targets = instruction.targets[0] if instruction.name == "bra" else len(self._instructions)
        if instruction.guard is not None:
            targets = np.where(self._registers.chosen(instruction, lanes), targets, self._at + 1)
        self._next[lanes] = targets

    def _wait(self, instruction: Instruction, lanes: Lanes) -> None:
        """Keeps threads waiting until all threads of their block wait that have not ended."""
        if instruction.guard is not None or instruction.operands != ("0",):
            raise UnknownInstruction("only barrier 0, of all threads, is known")
        self._waits[lanes] = True
        nexts = self._next.reshape(self._num_blocks, -1)
        waits = self._waits.reshape(self._num_blocks, -1)
        ended = nexts == len(self._instructions)
        for block in np.flatnonzero((waits | ended).all(axis=1) & waits.any(axis=1)):
            if len(np.unique(nexts[block, waits[block]])) > 1:
                raise BrokenBarrier("threads of a block wait at different barriers")
            waits[block] = False
            self._shared.end_interval(int(block))
