"""What each instruction does for some threads, but for those that decide which instruction is next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import BrokenWarp, Misaligned, UnknownInstruction
from ptx.arithmetic import operation_of
from ptx.memory import GlobalMemory, SharedMemory
from ptx.program import Instruction
from ptx.registers import Lanes, Registers, address_of, dtype_of, parts_of

ALL = slice(None)

Action = Callable[[Lanes], None]

_U32 = np.dtype(np.uint32)
_LANES = np.arange(32)
_ADDED = ("shared", "add", "u32")
_WHOLE_WARP = 0xFFFFFFFF


class Binder:
    """Binds instructions to registers and memory. `parameters` are the kernel's arguments."""

    def __init__(
        self,
        registers: Registers,
        memory: GlobalMemory,
        shared: SharedMemory,
        parameters: Mapping[str, int],
        division_seed: int | None,
    ) -> None:
        self._registers, self._memory, self._shared = registers, memory, shared
        self._parameters, self._division_seed = parameters, division_seed
        self._binders: dict[str, Callable[[Instruction], Action]] = {
            "mov": self._move,
            "cvta": self._address,
            "ld": self._load,
            "st": self._store,
            "atom": self._atomic,
            "shfl": self._shuffle,
            "vote": self._vote,
            "redux": self._reduction,
            "ldmatrix": self._load_matrices,
            "stmatrix": self._store_matrices,
            "bar": self._warp_barrier,
        }

    def bind(self, instruction: Instruction) -> Action:
        """Returns what executes an instruction. Raises UnknownInstruction."""
        action = self._binders.get(instruction.name, self._computation)(instruction)
        if instruction.guard is None:
            return action

        def guarded(lanes: Lanes) -> None:
            chosen = self._registers.chosen(instruction, lanes)
            if chosen.all():
                action(lanes)
            elif chosen.any():
                action(np.arange(len(chosen))[chosen] if isinstance(lanes, slice) else lanes[chosen])

        return guarded

    def _computation(self, instruction: Instruction) -> Action:
        operation, operands = operation_of(instruction, self._division_seed), instruction.operands
        if len(operands) != 1 + len(operation.sources):
            raise UnknownInstruction("another number of operands is known")
        put = self._registers.setter(operands[0], operation.result)
        gets = [self._registers.getter(*pair) for pair in zip(operands[1:], operation.sources, strict=True)]
        function = operation.function
        return lambda lanes: put(lanes, function(*[get(lanes) for get in gets]))

    def _move(self, instruction: Instruction) -> Action:
        """Copies a register, takes it apart, or joins some."""
        made, given = map(parts_of, instruction.operands)
        whole = dtype_of(instruction.type)
        if len(made) == len(given) == 1:
            put, get = self._registers.setter(made[0], whole), self._registers.getter(given[0], whole)
            return lambda lanes: put(lanes, get(lanes))
        part = np.dtype(f"u{whole.itemsize // max(len(made), len(given))}")
        shifts = [whole.type(8 * part.itemsize * number) for number in range(max(len(made), len(given)))]
        puts = [self._registers.setter(name, part if len(given) == 1 else whole) for name in made]
        gets = [self._registers.getter(name, whole if len(given) == 1 else part) for name in given]

        def take_apart(lanes: Lanes) -> None:
            value = gets[0](lanes)
            for put, shift in zip(puts, shifts, strict=True):
                put(lanes, (value >> shift).astype(part))

        def join(lanes: Lanes) -> None:
            value = whole.type(0)
            for get, shift in zip(gets, shifts, strict=True):
                value = value | (get(lanes).astype(whole) << shift)
            puts[0](lanes, value)

        return take_apart if len(given) == 1 else join

    # --- memory -------------------------------------------------------------------------------------------------------

    def _addresses(self, operand: str) -> Callable[[Lanes], NDArray[np.int64]]:
        base, offset = address_of(operand)
        if not base:
            constant = np.full(self._registers.count, offset)
            return constant.__getitem__
        array = self._registers.array(base)
        return lambda lanes: array[lanes].astype(np.int64) + offset

    def _address(self, instruction: Instruction) -> Action:
        _expect(instruction, ("local", "u64"))
        return self._move(instruction)  # local memory has addresses of its own

    def _load(self, instruction: Instruction) -> Action:
        dtype, names = dtype_of(instruction.type), parts_of(instruction.operands[0])
        puts = [self._registers.setter(name, dtype) for name in names]
        if instruction.modifiers[0] == "param":
            argument = np.uint64(self._parameters[instruction.operands[1]] & (2**64 - 1)).astype(dtype)
            return lambda lanes: puts[0](lanes, argument)
        is_shared, addresses = _is_shared(instruction), self._addresses(instruction.operands[1])

        def load(lanes: Lanes) -> None:
            at = addresses(lanes)
            if is_shared:
                values = self._shared.load(lanes, at, dtype, len(names))
            else:
                values = self._memory.load(at, dtype, len(names))
            for put, value in zip(puts, values, strict=True):
                put(lanes, value)

        return load

    def _store(self, instruction: Instruction) -> Action:
        dtype = dtype_of(instruction.type)
        gets = [self._registers.getter(name, dtype) for name in parts_of(instruction.operands[1])]
        is_shared, addresses = _is_shared(instruction), self._addresses(instruction.operands[0])

        def store(lanes: Lanes) -> None:
            at = addresses(lanes)
            values = [np.broadcast_to(get(lanes), at.shape) for get in gets]
            if is_shared:
                self._shared.store(lanes, at, values)
            else:
                self._memory.store(at, values)

        return store

    def _atomic(self, instruction: Instruction) -> Action:
        # Where no other block sees the memory, it does not matter which of its threads are to agree on an order.
        _expect(instruction, tuple(m for m in instruction.modifiers if m in ("relaxed", "cta", "gpu", "sys")) + _ADDED)
        put = self._registers.setter(instruction.operands[0], _U32)
        addresses = self._addresses(instruction.operands[1])
        get = self._registers.getter(instruction.operands[2], _U32)

        def add(lanes: Lanes) -> None:
            at = addresses(lanes)
            put(lanes, self._shared.add(lanes, at, np.broadcast_to(get(lanes), at.shape)))

        return add

    # --- whole warps --------------------------------------------------------------------------------------------------

    def _check_warps(self, lanes: Lanes, mask: str = "-1") -> None:
        if (self._registers.getter(mask, _U32)(lanes) != _WHOLE_WARP).any():
            raise UnknownInstruction("only masks of whole warps are known")
        if not isinstance(lanes, slice):
            is_whole = len(lanes) % 32 == 0
            if not is_whole or (lanes.reshape(-1, 32) != (lanes[::32] // 32 * 32)[:, None] + _LANES).any():
                raise BrokenWarp("only some threads of a warp execute an instruction of the whole warp")

    def _warp_barrier(self, instruction: Instruction) -> Action:
        _expect(instruction, ("warp", "sync"))
        return lambda lanes: self._check_warps(lanes, instruction.operands[0])

    def _shuffle(self, instruction: Instruction) -> Action:
        made, given, distance, clamp, mask = instruction.operands
        way = instruction.modifiers[1]
        _expect(instruction, ("sync", way, "b32"))
        find = {"bfly": np.bitwise_xor, "up": np.subtract, "down": np.add, "idx": lambda lane, number: number}[way]
        if int(clamp, 0) != (0 if way == "up" else 31):
            raise UnknownInstruction("only shuffles of whole warps are known")
        put, get = self._registers.setter(made, _U32), self._registers.getter(given, _U32)
        get_number = self._registers.getter(distance, np.int32)

        def shuffle(lanes: Lanes) -> None:
            self._check_warps(lanes, mask)
            values = get(lanes).reshape(-1, 32)
            numbers = np.broadcast_to(get_number(lanes), values.size).reshape(-1, 32)
            sources = find(_LANES, numbers)
            sources = np.where((sources >= 0) & (sources < 32), sources, _LANES)
            put(lanes, np.take_along_axis(values, sources, axis=1).reshape(-1))

        return shuffle

    def _vote(self, instruction: Instruction) -> Action:
        _expect(instruction, ("sync", "ballot", "b32"))
        made, given, mask = instruction.operands
        put, get = self._registers.setter(made, _U32), self._registers.getter(given, bool)

        def vote(lanes: Lanes) -> None:
            self._check_warps(lanes, mask)
            bits = np.packbits(get(lanes).reshape(-1, 32), axis=1, bitorder="little")
            put(lanes, np.repeat(bits.view(_U32)[:, 0], 32))

        return vote

    def _reduction(self, instruction: Instruction) -> Action:
        way, dtype = instruction.modifiers[1], dtype_of(instruction.type)
        functions: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
        functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        if way not in functions or instruction.type not in ("s32", "u32", "b32"):
            raise UnknownInstruction("only integers are known")
        made, given, mask = instruction.operands
        put, get, function = self._registers.setter(made, dtype), self._registers.getter(given, dtype), functions[way]

        def reduce(lanes: Lanes) -> None:
            self._check_warps(lanes, mask)
            put(lanes, np.repeat(function.reduce(get(lanes).reshape(-1, 32), axis=1, dtype=dtype), 32))

        return reduce

    def _load_matrices(self, instruction: Instruction) -> Action:
        names, places = self._matrices(instruction, *instruction.operands)
        puts = [self._registers.setter(name, _U32) for name in names]

        def load(lanes: Lanes) -> None:
            for put, at in zip(puts, places(lanes), strict=True):
                put(lanes, self._shared.load(lanes, at, _U32, 1)[0])

        return load

    def _store_matrices(self, instruction: Instruction) -> Action:
        names, places = self._matrices(instruction, *reversed(instruction.operands))
        gets = [self._registers.getter(name, _U32) for name in names]

        def store(lanes: Lanes) -> None:
            for get, at in zip(gets, places(lanes), strict=True):
                self._shared.store(lanes, at, [np.broadcast_to(get(lanes), at.shape)])

        return store

    def _matrices(
        self, instruction: Instruction, vector: str, operand: str
    ) -> tuple[list[str], Callable[[Lanes], list[NDArray[np.int64]]]]:
        """Returns registers, and what returns the place of each of them in shared memory.

        A matrix has eight rows of 16 bytes. Eight threads state the addresses of its rows; each thread has four bytes.
        """
        names, addresses = parts_of(vector), self._addresses(operand)
        _expect(instruction, ("sync", "aligned", "m8n8", f"x{len(names)}", "shared", "b16"))

        def places(lanes: Lanes) -> list[NDArray[np.int64]]:
            self._check_warps(lanes)
            rows = addresses(lanes).reshape(-1, 32)
            starts = [rows[:, 8 * number + _LANES // 4] for number in range(len(names))]
            if any((start % 16).any() for start in starts):
                raise Misaligned("the row of a matrix does not begin at a multiple of 16 bytes")
            return [(start + _LANES % 4 * 4).reshape(-1) for start in starts]

        return names, places


def _is_shared(instruction: Instruction) -> bool:
    """Returns whether an access is to shared memory. Local memory and addresses of any kind are as global ones."""
    spaces = set(instruction.modifiers[:-1]) - {"v2", "v4", "v8"}
    if spaces not in ({"shared"}, {"global"}, {"local"}, set()):
        raise UnknownInstruction("only plain accesses to global, shared and local memory are known")
    return spaces == {"shared"}


def _expect(instruction: Instruction, modifiers: tuple[Any, ...]) -> None:
    if instruction.modifiers != modifiers:
        raise UnknownInstruction("only some forms of it are known")
