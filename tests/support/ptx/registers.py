"""The registers of many threads, as arrays, and the types by which instructions read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx.program import Instruction, Program

Lanes = slice | NDArray[np.int64]
"""The threads that execute an instruction: all of them, or those with these numbers."""

Getter = Callable[[Lanes], Any]
Setter = Callable[[Lanes, Any], None]

_POISON = 0xDB
_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def dtype_of(type_name: str) -> np.dtype[Any]:
    """Returns the dtype of a PTX type such as "s32". Untyped bits are unsigned integers."""
    if type_name == "pred":
        return np.dtype(bool)
    if type_name in ("bf16", "bf16x2", "f16x2"):  # NumPy has none
        return np.dtype(np.uint16 if type_name == "bf16" else np.uint32)
    return np.dtype(f"{_KINDS[type_name[0]]}{int(type_name[1:]) // 8}")


def parts_of(operand: str) -> list[str]:
    """Returns the elements of a vector such as "{%r1, %r2}"; an operand that is none is its only element."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


class Registers:
    """Registers by name. `special` holds the values of read-only registers, such as %tid.x, in
    each thread."""

    def __init__(self, program: Program, count: int, special: Mapping[str, NDArray[Any]]) -> None:
        self.count = count
        self._widths = program.widths
        self._arrays: dict[str, NDArray[Any]] = dict(special)

    def array(self, name: str) -> NDArray[Any]:
        """Returns a register of all threads, as unsigned integers, or bools if it is a predicate."""
        if name not in self._arrays:
            width = self._widths.get(name) or self._widths[name.rstrip("0123456789")]
            dtype = np.dtype(bool) if width == 1 else np.dtype(f"u{width // 8}")
            poison = np.full(self.count * dtype.itemsize, _POISON if width > 1 else True, np.uint8)
            self._arrays[name] = poison.view(dtype)
        return self._arrays[name]

    def getter(self, operand: str, dtype: Any) -> Getter:
        """Returns what reads a register, or a constant, as values of `dtype`."""
        dtype = np.dtype(dtype)
        if operand.startswith("!"):
            inverted = self.array(operand[1:])
            return lambda lanes: ~inverted[lanes]
        if not self._is_register(operand):
            value = constant(operand, dtype)
            return lambda lanes: value
        array = self.array(operand)
        assert dtype.itemsize <= array.itemsize, (operand, dtype)
        # The low bytes come first.
        return array.view(dtype)[:: array.itemsize // dtype.itemsize].__getitem__

    def setter(self, operand: str, dtype: Any) -> Setter:
        """Returns what writes values of `dtype` to a register. Integers are extended to its width by their sign."""
        if operand == "_":
            return lambda lanes, value: None
        dtype, array = np.dtype(dtype), self.array(operand)
        if dtype.itemsize == array.itemsize:
            return array.view(dtype).__setitem__
        assert dtype.itemsize < array.itemsize, (operand, dtype)
        assert dtype.kind in "iu", (operand, dtype)
        return array.view(f"{dtype.kind}{array.itemsize}").__setitem__

    def chosen(self, instruction: Instruction, lanes: Lanes) -> NDArray[np.bool_]:
        """Returns for which of these threads an instruction with a guard is executed."""
        assert instruction.guard is not None
        return np.asarray(self.array(instruction.guard)[lanes] ^ instruction.is_negated)

    def _is_register(self, operand: str) -> bool:
        return operand in self._arrays or operand in self._widths or operand.rstrip("0123456789") in self._widths


def constant(operand: str, dtype: np.dtype[Any]) -> Any:
    """Returns a number that PTX states, such as -1, 0x1F or 0f3F800000, or the address of shared memory, as `dtype`."""
    unsigned = np.dtype(bool if dtype.kind == "b" else f"u{dtype.itemsize}")
    if operand.startswith("global_smem"):
        return dtype.type(address_of(operand)[1])
    if match := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})|0[dD]([0-9A-Fa-f]{16})", operand):
        bits: Any = np.uint32(int(match[1], 16)) if match[1] else np.uint64(int(match[2], 16))
        assert bits.itemsize == dtype.itemsize, (operand, dtype)
        return bits.view(dtype)
    number = int(operand.rstrip("U"), 0)
    if dtype.kind == "b":
        return dtype.type(number)
    return unsigned.type(number & ((1 << (8 * dtype.itemsize)) - 1)).view(dtype)


def address_of(operand: str) -> tuple[str, int]:
    """Returns the register and the offset of an address such as "%rd1+16". Shared memory begins at 0, without one."""
    base, _, offset = operand.replace(" ", "").partition("+")
    return "" if base == "global_smem" else base, int(offset or 0)
