"""Instructions that compute a register of each thread from registers of the same thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptx import Undefined, UnknownInstruction
from ptx.program import Instruction
from ptx.registers import dtype_of

_U16, _U32, _U64 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_BOOL = np.dtype(bool)


@dataclass(frozen=True)
class Operation:
    """`function` takes values of `sources` and returns values of `result`."""

    function: Callable[..., Any]
    sources: tuple[np.dtype[Any], ...]
    result: np.dtype[Any]


def operation_of(instruction: Instruction, division_seed: int | None = None) -> Operation:
    """Returns what an instruction computes. Raises UnknownInstruction.

    PTX allows an error of 2 ulp in a `div.full`. With a seed, quotients have such errors, which depend on the operands
    and the seed alone.
    """
    if "ftz" in instruction.modifiers:
        modifiers = tuple(modifier for modifier in instruction.modifiers if modifier != "ftz")
        return _flushed(operation_of(replace(instruction, modifiers=modifiers), division_seed))
    name, last = instruction.name, instruction.type
    made = None
    if last in ("f32x2", "b32x2"):
        made = _paired(name)
    elif instruction.modifiers[-2:-1] == ("f32",) and last in ("f16", "bf16") and name in ("add", "sub", "fma"):
        made = _mixed(name, last)
    elif name in _DECODERS:
        made = _DECODERS[name](instruction)
    elif name in _BINARY and set(instruction.modifiers[:-1]) <= {"rn", "lo"}:
        made = _binary(name, dtype_of(last), len(instruction.operands) - 1)
    elif name in _UNARY and len(instruction.modifiers) == 1:
        dtype = dtype_of(last)
        made = Operation(_UNARY[name], (dtype,), dtype)
    if made is None:
        raise UnknownInstruction("no such instruction is known")
    if name == "div" and division_seed is not None and instruction.modifiers[0] == "full":
        exact = made.function
        return Operation(lambda a, b: _within_two_ulp(exact(a, b), a, b, division_seed), made.sources, made.result)
    return made


# --- whole numbers, bits, and what floats do in the same way ----------------------------------------------------------


def _remainder(a: Any, b: Any) -> Any:
    if (np.asarray(b) == 0).any():
        raise Undefined("a division by 0")
    return np.fmod(a, b)


def _quotient(a: Any, b: Any) -> Any:
    return a / b if a.dtype.kind == "f" else (a - _remainder(a, b)) // b


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "rem": _remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    # Of a number and a NaN, the number.
    "min": np.fmin,
    "max": np.fmax,
}
_UNARY: dict[str, Callable[[Any], Any]] = {"neg": np.negative, "not": np.invert, "abs": np.abs}


def _binary(name: str, dtype: np.dtype[Any], count: int) -> Operation | None:
    function = _BINARY[name]
    if dtype == np.float16 or (count == 3 and name not in ("min", "max")):
        return None
    if count == 3:
        return Operation(lambda a, b, c: function(function(a, b), c), (dtype,) * 3, dtype)
    return Operation(function, (dtype,) * 2, dtype)


def _multiplication(instruction: Instruction) -> Operation | None:
    """Of `mul` and `mad`: the low half of the product, its high half, or all of it."""
    dtype, adds = dtype_of(instruction.type), instruction.name == "mad"
    form = instruction.modifiers[0]
    if len(instruction.modifiers) != 2 or (adds and form == "rn"):
        return None
    if form in ("lo", "rn"):
        sources = (dtype,) * (3 if adds else 2)
        return Operation((lambda a, b, c: a * b + c) if adds else np.multiply, sources, dtype)
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if dtype.itemsize < 8 else None
    if wide is None:
        return None

    def product(a: Any, b: Any) -> Any:
        return a.astype(wide) * b.astype(wide)

    if form == "hi":
        high = Operation(lambda a, b: product(a, b) >> wide.type(8 * dtype.itemsize), (dtype, dtype), dtype)
        return None if adds else high
    if form != "wide":
        return None
    if adds:
        return Operation(lambda a, b, c: product(a, b) + c, (dtype, dtype, wide), wide)
    return Operation(product, (dtype, dtype), wide)


def _shift(instruction: Instruction) -> Operation:
    """Shifts by more than all bits leave nothing, or only the sign."""
    dtype = dtype_of(instruction.type)
    bits = 8 * dtype.itemsize
    shift = np.left_shift if instruction.name == "shl" else np.right_shift
    keeps_sign = instruction.name == "shr" and dtype.kind == "i"

    def shifted(a: Any, count: Any) -> Any:
        made = shift(a, np.minimum(count, np.uint32(bits - 1)).astype(dtype))
        return made if keeps_sign else np.where(count < bits, made, dtype.type(0))

    return Operation(shifted, (dtype, _U32), dtype)


def _bit_field(instruction: Instruction) -> Operation:
    """A field, of which all bits must exist, extended by zeros or by its highest bit."""
    dtype = dtype_of(instruction.type)
    bits = 8 * dtype.itemsize

    def extracted(a: Any, start: Any, length: Any) -> Any:
        if (np.asarray(start + length) > bits).any() or (np.asarray(length) == 0).any():
            raise UnknownInstruction("only fields are known that exist")
        raised = a << (bits - start - length).astype(dtype)
        return raised >> (bits - length).astype(dtype)

    return Operation(extracted, (dtype, _U32, _U32), dtype)


def _inserted_field(instruction: Instruction) -> Operation:
    """The low bits of one number in place of bits of another, all of which must exist."""
    dtype = dtype_of(instruction.type)

    def inserted(a: Any, b: Any, start: Any, length: Any) -> Any:
        bits = 8 * dtype.itemsize
        if (np.asarray(start + length) > bits).any() or (np.asarray(length) == bits).any():
            raise UnknownInstruction("only fields are known that exist, of less than all bits")
        field = ((dtype.type(1) << length.astype(dtype)) - dtype.type(1)) << start.astype(dtype)
        return (b & ~field) | (a << start.astype(dtype) & field)

    return Operation(inserted, (dtype, dtype, _U32, _U32), dtype)


def _permuted_bytes(instruction: Instruction) -> Operation | None:
    def permuted(a: Any, b: Any, selector: Any) -> Any:
        both, made = a.astype(_U64) | (b.astype(_U64) << np.uint64(32)), np.uint32(0)
        for number in range(4):
            chosen = (selector >> np.uint32(4 * number)) & np.uint32(15)
            byte = ((both >> ((chosen & np.uint32(7)) * np.uint32(8)).astype(_U64)) & np.uint64(255)).astype(_U32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            made = made | (np.where(chosen & np.uint32(8), sign, byte) << np.uint32(8 * number))
        return made

    return Operation(permuted, (_U32,) * 3, _U32) if instruction.modifiers == ("b32",) else None


def _ones(instruction: Instruction) -> Operation:
    def counted(a: Any) -> Any:
        return np.unpackbits(np.atleast_1d(a).view(np.uint8).reshape(-1, a.itemsize), axis=1).sum(axis=1)

    return Operation(counted, (dtype_of(instruction.type),), _U32)


# --- conditions -------------------------------------------------------------------------------------------------------

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(instruction: Instruction) -> Operation | None:
    name, *joined, _ = instruction.modifiers
    dtype = dtype_of(instruction.type)
    if name not in _COMPARISONS and name.removesuffix("u") not in _COMPARISONS and name not in ("num", "nan"):
        return None

    def compared(a: Any, b: Any) -> Any:
        if dtype.kind != "f":
            return _COMPARISONS[name](a, b)
        unordered = (a != a) | (b != b)
        if name in ("num", "nan"):
            return unordered if name == "nan" else ~unordered
        if name in _COMPARISONS:
            return _COMPARISONS[name](a, b) & ~unordered
        return _COMPARISONS[name.removesuffix("u")](a, b) | unordered

    if not joined:
        return Operation(compared, (dtype, dtype), _BOOL)
    if len(joined) > 1 or joined[0] not in ("and", "or", "xor"):
        return None
    join = _BINARY[joined[0]]
    return Operation(lambda a, b, other: join(compared(a, b), other), (dtype, dtype, _BOOL), _BOOL)


def _selection(instruction: Instruction) -> Operation:
    dtype = dtype_of(instruction.type)
    return Operation(lambda a, b, first: np.where(first, a, b), (dtype, dtype, _BOOL), dtype)


# --- floats -----------------------------------------------------------------------------------------------------------


def fused_multiply_add(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[np.float32]:
    """Returns a * b + c of float32 values, rounded once. A product of two has no more bits than a float64."""
    with np.errstate(all="ignore"):
        product, addend = np.float64(a) * np.float64(b), np.float64(c)
        total = np.atleast_1d(product + addend)
        bits = total.view(np.int64)
        # A sum that float64 has rounded would be rounded again, which only matters next to the middle of two float32.
        near = ((bits & 0x1FFFFFFF) == 0x10000000) | (np.abs(total) < 2.0**-126)
        if near.any():
            part = total - product
            rest = (product - (total - part)) + (addend - part)  # what the sum has lost
            is_even = near & (bits & 1 == 0) & np.isfinite(rest) & (rest != 0)
            # The last bit of a float64 that is not exact is made 1, between the float64 below and above.
            bits += np.where(is_even, np.where((rest > 0) == (total > 0), 1, -1), 0)
        return total.astype(np.float32)


def _flushed(operation: Operation) -> Operation:
    """Takes float32 numbers below all that have 24 bits for 0, operands and results."""

    def flush(a: Any) -> Any:
        is_small = a.dtype == _F32 and np.abs(a) < np.float32(2.0**-126)
        return np.where(is_small, np.copysign(np.float32(0), a), a) if np.any(is_small) else a

    def flushed(*values: Any) -> Any:
        return flush(operation.function(*map(flush, values)))

    return Operation(flushed, operation.sources, operation.result)


def _within_two_ulp(quotient: Any, a: Any, b: Any, seed: int) -> Any:
    mixed = a.view(_U32).astype(_U64) * np.uint64(2654435761) + b.view(_U32).astype(_U64) * np.uint64(40503)
    mixed = (mixed + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    error = ((mixed >> np.uint64(40)) % np.uint64(5)).astype(np.int32) - np.int32(2)
    moved = (quotient.view(np.int32) + error).view(_F32)
    return np.where(np.isfinite(quotient) & (quotient != 0), moved, quotient)


def _division(instruction: Instruction) -> Operation | None:
    dtype = dtype_of(instruction.type)
    forms = {"f": [("full",), ("rn",)], "i": [()], "u": [()]}[dtype.kind]
    return Operation(_quotient, (dtype, dtype), dtype) if instruction.modifiers[:-1] in forms else None


def _fused(instruction: Instruction) -> Operation | None:
    return Operation(fused_multiply_add, (_F32,) * 3, _F32) if instruction.modifiers == ("rn", "f32") else None


def _paired(name: str) -> Operation | None:
    """Two float32 in one register of 64 bits."""
    function = fused_multiply_add if name == "fma" else _BINARY.get(name)
    if function is None:
        return None

    def both(*pairs: Any) -> Any:
        halves = []
        for number in (0, 1):
            values = [(pair >> np.uint64(32 * number)).astype(_U32).view(_F32) for pair in pairs]
            halves.append(np.asarray(function(*values)).astype(_F32).view(_U32).astype(_U64))
        return halves[0] | (halves[1] << np.uint64(32))

    return Operation(both, (_U64,) * (3 if name == "fma" else 2), _U64)


def _mixed(name: str, half: str) -> Operation:
    """A sum of a float32 and a float16 or bfloat16, or of a float32 and a product of two of those."""
    source = dtype_of(half)
    widened = _of_bfloat16 if half == "bf16" else (lambda a: a.astype(_F32))
    if name == "fma":
        made = lambda a, b, c: fused_multiply_add(widened(a), widened(b), c)  # noqa: E731
        return Operation(made, (source, source, _F32), _F32)
    function = _BINARY[name]
    return Operation(lambda a, c: function(widened(a), c), (source, _F32), _F32)


# --- conversions ------------------------------------------------------------------------------------------------------

_TO_WHOLE = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}


def _to_bfloat16(a: Any) -> Any:
    bits = np.asarray(a).view(_U32).astype(_U64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(a), np.uint16(0x7FFF), rounded.astype(_U16))


def _integers_to_bfloat16(a: Any) -> Any:
    mantissas, exponents = np.frexp(a.astype(_F64))  # exact for 32 bits
    return _to_bfloat16(np.ldexp(np.rint(mantissas * 256), exponents - 8).astype(_F32))


def _of_bfloat16(a: Any) -> Any:
    return (np.asarray(a).astype(_U32) << np.uint32(16)).view(_F32)


def _to_integers(a: Any, dtype: np.dtype[Any], whole: Callable[[Any], Any]) -> Any:
    """Numbers that are too large become the largest, and NaN 0."""
    limits, a = np.iinfo(dtype), np.nan_to_num(whole(a.astype(_F64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    below, above = a <= float(limits.min), a >= float(limits.max)
    made = np.where(below | above, 0.0, a).astype(dtype)
    return np.where(below, dtype.type(limits.min), np.where(above, dtype.type(limits.max), made))


def _conversion(instruction: Instruction) -> Operation | None:
    *how, made, given = instruction.modifiers
    source, result = dtype_of(given), dtype_of(made)
    if made in ("bf16x2", "f16x2") and given == "f32" and how == ["rn"]:
        half = _to_bfloat16 if made == "bf16x2" else (lambda a: a.astype(np.float16).view(_U16))
        return Operation(lambda high, low: (half(high).astype(_U32) << np.uint32(16)) | half(low), (_F32, _F32), result)
    if made == "bf16" and source.kind in "iu" and source.itemsize <= 4 and how == ["rn"]:
        return Operation(_integers_to_bfloat16, (source,), result)
    if made == "bf16":
        return Operation(_to_bfloat16, (source,), result) if given == "f32" and how == ["rn"] else None
    if given == "bf16":
        return Operation(_of_bfloat16, (source,), result) if made == "f32" and not how else None
    if source.kind == "f" and how and how[0] in _TO_WHOLE:
        whole = _TO_WHOLE[how[0]]
        if how[1:] or (result.kind == "f" and result != source):
            return None
        if result.kind == "f":
            return Operation(whole, (source,), result)
        return Operation(lambda a: _to_integers(a, result, whole), (source,), result)
    if how not in ([], ["rn"]) or (source.kind == "f" and result.kind != "f"):
        return None
    return Operation(lambda a: a.astype(result), (source,), result)


_DECODERS: dict[str, Callable[[Instruction], Operation | None]] = {
    "mul": _multiplication,
    "mad": _multiplication,
    "fma": _fused,
    "div": _division,
    "shl": _shift,
    "shr": _shift,
    "bfe": _bit_field,
    "bfi": _inserted_field,
    "prmt": _permuted_bytes,
    "popc": _ones,
    "setp": _comparison,
    "selp": _selection,
    "cvt": _conversion,
}
