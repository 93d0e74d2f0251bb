"""The emulator of PTX in tests/support/ptx: each kind of instruction that Triton writes, against plain arithmetic."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx import Undefined, UnknownInstruction
from ptx.arithmetic import fused_multiply_add
from ptx.registers import dtype_of
from ptx_kernels import executed

F32 = np.float32
NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 100, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 0x7FFFFFFF, 0x80000000]
NUMBERS += [0xFFFFFFFF, 0x100000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 254.5, 255.0, 3e9, -3e9, 1e-42, -1e-42, 1e30, 65520.0, 1e20, -1e20]
FLOATS += [math.inf, -math.inf, math.nan, 1 / 3]


def drawn(type_name: str, count: int, seed: int) -> NDArray[Any]:
    """Returns numbers of a type, first those at the ends of ranges, all pairs of which are in two of them."""
    dtype, rng = dtype_of(type_name), np.random.default_rng(seed)
    if dtype.kind == "f":
        ends, others = np.array(FLOATS), rng.normal(0, 300, count)
    else:
        ends = np.array(NUMBERS, np.uint64)
        others = rng.integers(0, 2**63, count, np.uint64) >> rng.integers(0, 60, count, np.uint64)
    chosen = np.resize(ends, count) if seed == 0 else np.repeat(ends, -(-count // len(ends)))[:count]
    with np.errstate(all="ignore"):
        return np.where(np.arange(count) < 600, chosen, others).astype(dtype)


def wrapped(number: int, dtype: np.dtype[Any]) -> Any:
    return np.array([number & ((1 << 8 * dtype.itemsize) - 1)], np.uint64).astype(f"u{dtype.itemsize}").view(dtype)[0]


def check(text: str, types: list[str], made: str, function: Callable[..., Any]) -> None:
    """Compares an instruction with a function of Python's numbers, or of NumPy's floats."""
    dtype = dtype_of(made)
    given = [drawn(name, 800, number) for number, name in enumerate(types)]
    found = executed(f"{text};", given, types, made)
    with np.errstate(all="ignore"):
        values = [function(*(v if v.dtype.kind == "f" else int(v) for v in some)) for some in zip(*given, strict=True)]
        expected = np.array([wrapped(v, dtype) if dtype.kind in "iu" else v for v in values], dtype)
    np.testing.assert_array_equal(found, expected, text)


def shifted(number: int, count: int, bits: int) -> int:
    return number << count if count < bits else 0


@pytest.mark.parametrize(
    ("text", "types", "made", "function"),
    [
        ("add.s32 d, a, b", ["s32", "s32"], "s32", lambda a, b: a + b),
        ("add.s64 d, a, b", ["s64", "s64"], "s64", lambda a, b: a + b),
        ("add.s32 d, a, -3", ["s32"], "s32", lambda a: a - 3),
        ("sub.s16 d, a, b", ["s16", "s16"], "s16", lambda a, b: a - b),
        ("sub.s64 d, a, b", ["s64", "s64"], "s64", lambda a, b: a - b),
        ("mul.lo.s16 d, a, b", ["s16", "s16"], "s16", lambda a, b: a * b),
        ("mul.lo.s64 d, a, b", ["s64", "s64"], "s64", lambda a, b: a * b),
        ("mul.hi.s32 d, a, b", ["s32", "s32"], "s32", lambda a, b: a * b >> 32),
        ("mul.hi.u32 d, a, b", ["u32", "u32"], "u32", lambda a, b: a * b >> 32),
        ("mul.wide.s32 d, a, b", ["s32", "s32"], "s64", lambda a, b: a * b),
        ("mul.wide.u32 d, a, b", ["u32", "u32"], "u64", lambda a, b: a * b),
        ("mul.wide.u16 d, a, b", ["u16", "u16"], "u32", lambda a, b: a * b),
        ("mad.lo.s32 d, a, b, c", ["s32", "s32", "s32"], "s32", lambda a, b, c: a * b + c),
        ("mad.wide.s32 d, a, b, c", ["s32", "s32", "s64"], "s64", lambda a, b, c: a * b + c),
        ("mad.wide.u32 d, a, 96, c", ["u32", "u32", "s64"], "s64", lambda a, b, c: a * 96 + c),
        ("div.s32 d, a, 7", ["s32"], "s32", lambda a: int(Fraction(a, 7))),
        ("rem.s32 d, a, 7", ["s32"], "s32", lambda a: int(math.fmod(a, 7))),
        ("div.u32 d, a, 7", ["u32"], "u32", lambda a: a // 7),
        ("min.s32 d, a, b", ["s32", "s32"], "s32", min),
        ("max.u32 d, a, b", ["u32", "u32"], "u32", max),
        ("max.s64 d, a, b", ["s64", "s64"], "s64", max),
        ("neg.s32 d, a", ["s32"], "s32", lambda a: -a),
        ("abs.s32 d, a", ["s32"], "s32", abs),
    ],
)
def test_whole_numbers(text: str, types: list[str], made: str, function: Callable[..., int]) -> None:
    check(text, types, made, function)


def permuted(a: int, b: int, selector: int) -> int:
    data, made = (a | b << 32).to_bytes(8, "little"), b""
    for number in range(4):
        chosen = selector >> 4 * number & 15
        byte = data[chosen & 7]
        made += bytes([(255 if byte & 128 else 0) if chosen & 8 else byte])
    return int.from_bytes(made, "little")


@pytest.mark.parametrize(
    ("text", "types", "made", "function"),
    [
        ("and.b16 d, a, b", ["b16", "b16"], "b16", lambda a, b: a & b),
        ("or.b64 d, a, b", ["b64", "b64"], "b64", lambda a, b: a | b),
        ("xor.b32 d, a, 0xFF", ["b32"], "b32", lambda a: a ^ 255),
        ("not.b32 d, a", ["b32"], "b32", lambda a: ~a),
        ("shl.b16 d, a, b", ["b16", "u32"], "b16", lambda a, n: shifted(a, n, 16)),
        ("shl.b32 d, a, b", ["b32", "u32"], "b32", lambda a, n: shifted(a, n, 32)),
        ("shr.u32 d, a, b", ["u32", "u32"], "u32", lambda a, n: a >> n),
        ("shr.u64 d, a, b", ["u64", "u32"], "u64", lambda a, n: a >> n),
        ("shr.s32 d, a, b", ["s32", "u32"], "s32", lambda a, n: a >> n),
        ("shr.s64 d, a, 63", ["s64"], "s64", lambda a: a >> 63),
        ("bfe.u32 d, a, 3, 5", ["u32"], "u32", lambda a: a >> 3 & 31),
        ("bfe.u64 d, a, 8, 24", ["u64"], "u64", lambda a: a >> 8 & 0xFFFFFF),
        ("bfe.s32 d, a, 4, 1", ["s32"], "s32", lambda a: -(a >> 4 & 1)),
        ("bfi.b32 d, a, b, 8, 8", ["b32", "b32"], "b32", lambda a, b: b & 0xFFFF00FF | (a & 255) << 8),
        ("bfi.b32 d, a, b, 24, 8", ["b32", "b32"], "b32", lambda a, b: b & 0xFFFFFF | (a & 255) << 24),
        ("popc.b32 d, a", ["b32"], "u32", lambda a: a.bit_count()),
        ("prmt.b32 d, a, b, c", ["b32", "b32", "b32"], "b32", permuted),
        ("prmt.b32 d, a, b, 0x7340U", ["b32", "b32"], "b32", lambda a, b: permuted(a, b, 0x7340)),
        ("mov.b64 d, {a, b}", ["b32", "b32"], "b64", lambda a, b: a | b << 32),
        ("mov.b64 {_, d}, a", ["b64"], "b32", lambda a: a >> 32),
        ("mov.b32 {d, _}, a", ["b32"], "b16", lambda a: a),
    ],
)
def test_bits(text: str, types: list[str], made: str, function: Callable[..., int]) -> None:
    check(text, types, made, function)


def flushed(number: np.float32) -> np.float32:
    return F32(0) * number if abs(number) < 2**-126 else number


@pytest.mark.parametrize(
    ("text", "types", "made", "function"),
    [
        ("add.rn.f32 d, a, b", ["f32", "f32"], "f32", lambda a, b: a + b),
        ("add.rn.f32 d, a, 0f3F800000", ["f32"], "f32", lambda a: a + F32(1)),
        ("sub.rn.f64 d, a, b", ["f64", "f64"], "f64", lambda a, b: a - b),
        ("mul.rn.f32 d, a, b", ["f32", "f32"], "f32", lambda a, b: a * b),
        ("mul.rn.f64 d, a, 0d3FE0000000000000", ["f64"], "f64", lambda a: a * 0.5),
        ("div.full.f32 d, a, b", ["f32", "f32"], "f32", lambda a, b: a / b),
        ("div.rn.f64 d, a, b", ["f64", "f64"], "f64", lambda a, b: a / b),
        (
            "min.f32 d, a, b",
            ["f32", "f32"],
            "f32",
            lambda a, b: b if math.isnan(a) else a if math.isnan(b) else min(a, b),
        ),
        ("max.f64 d, a, 0d0000000000000000", ["f64"], "f64", lambda a: 0.0 if math.isnan(a) else max(a, 0.0)),
        ("abs.f32 d, a", ["f32"], "f32", abs),
        ("neg.f32 d, a", ["f32"], "f32", lambda a: -a),
        ("cvt.rmi.ftz.f32.f32 d, a", ["f32"], "f32", lambda a: np.floor(flushed(a))),
        ("mul.rn.ftz.f32 d, a, b", ["f32", "f32"], "f32", lambda a, b: flushed(flushed(a) * flushed(b))),
        ("div.rn.ftz.f32 d, a, b", ["f32", "f32"], "f32", lambda a, b: flushed(flushed(a) / flushed(b))),
    ],
)
def test_floats(text: str, types: list[str], made: str, function: Callable[..., Any]) -> None:
    check(text, types, made, function)


def nearest(exact: Fraction) -> np.float32:
    """Returns the float32 next to a number, and of two the one whose last bit is 0."""
    about = F32(float(exact))
    some = [about, np.nextafter(about, F32(np.inf)), np.nextafter(about, F32(-np.inf))]
    return min(some, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_a_fused_product_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(1 << 23, 1 << 24, 3000).astype(F32) * F32(2) ** rng.integers(-30, 9, 3000) for _ in "ab")
    # Sums close to the middle between two float32, where the float64 between would be rounded twice.
    product = a.astype(np.float64) * b
    c = (np.spacing(product.astype(F32)) / 2 + np.spacing(product) * rng.integers(-1, 2, 3000) - product).astype(F32)
    c[::2] = np.ldexp(a[::2], rng.integers(-60, 60, 1500))
    small = F32(2) ** -140
    for x, y, z in ((a, b, c), (a, b, -c), (a * small, F32(2) ** -23 + 0 * b, c * 0)):
        found = fused_multiply_add(x, y, z)
        exact = [Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)) for p, q, r in zip(x, y, z, strict=True)]
        np.testing.assert_array_equal(found, [nearest(number) for number in exact])
    # Just above the middle: a float64 has no bit for the rest.
    middle = fused_multiply_add(*np.array([[1 + 2**-12], [1 + 2**-12], [2.0**-60]], F32))
    np.testing.assert_array_equal(middle, [nearest(Fraction(4097, 4096) ** 2 + Fraction(1, 2**60))])
    special = fused_multiply_add(*np.array([[np.inf, 0, 3e38], [1, np.inf, 3e38], [-np.inf, 1, -1]], F32))
    np.testing.assert_array_equal(special, F32([np.nan, np.nan, np.inf]))


def test_pairs_of_floats_are_computed_each() -> None:
    a, b, c = np.random.default_rng(0).normal(size=(3, 64, 2)).astype(F32)
    packed = [pair.view(np.uint64)[:, 0] for pair in (a, b, c)]
    for name, expected in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        found = executed(f"{name}.rn.f32x2 d, a, b;", packed[:2], ["b64"] * 2, "b64")
        np.testing.assert_array_equal(found.view(F32).reshape(-1, 2), expected)
    found = executed("fma.rn.f32x2 d, a, b, c;", packed, ["b64"] * 3, "b64")
    np.testing.assert_array_equal(found.view(F32).reshape(-1, 2), fused_multiply_add(a, b, c))


def clipped(number: Any, low: int, high: int, whole: Callable[[Any], Any]) -> int:
    return 0 if math.isnan(number) else int(whole(min(max(float(number), low), high)))


@pytest.mark.parametrize(
    ("text", "types", "made", "function"),
    [
        ("cvt.u16.u32 d, a", ["u32"], "u16", lambda a: a),
        ("cvt.s64.s32 d, a", ["s32"], "s64", lambda a: a),
        ("cvt.u64.u32 d, a", ["u32"], "u64", lambda a: a),
        ("cvt.s16.s8 d, a", ["s16"], "s16", lambda a: ((a & 255) ^ 128) - 128),
        ("cvt.rn.f32.s32 d, a", ["s32"], "f32", lambda a: nearest(Fraction(a))),
        ("cvt.rn.f32.u16 d, a", ["u16"], "f32", lambda a: a),
        ("cvt.rn.f32.s64 d, a", ["s64"], "f32", lambda a: nearest(Fraction(a))),
        ("cvt.rn.f64.s64 d, a", ["s64"], "f64", lambda a: float(a)),
        ("cvt.rn.f16.u16 d, a", ["u16"], "f16", lambda a: np.float64(a)),
        ("cvt.rn.f32.f64 d, a", ["f64"], "f32", lambda a: a),
        ("cvt.rn.f16.f32 d, a", ["f32"], "f16", lambda a: a),
        ("cvt.rzi.s32.f32 d, a", ["f32"], "s32", lambda a: clipped(a, -(2**31), 2**31 - 1, math.trunc)),
        ("cvt.rzi.u16.f32 d, a", ["f32"], "u16", lambda a: clipped(a, 0, 65535, math.trunc)),
        ("cvt.rmi.s64.f64 d, a", ["f64"], "s64", lambda a: clipped(a, -(2**63), 2**63 - 1, math.floor)),
        ("cvt.rni.s32.f32 d, a", ["f32"], "s32", lambda a: clipped(a, -(2**31), 2**31 - 1, round)),
    ],
)
def test_conversions(text: str, types: list[str], made: str, function: Callable[..., Any]) -> None:
    check(text, types, made, function)


def test_bfloat16_has_the_high_half_of_a_rounded_float32() -> None:
    a, b = np.float32(FLOATS * 3), np.random.default_rng(0).normal(size=66).astype(F32)
    half = [torch.from_numpy(v).bfloat16().view(torch.int16).numpy().view(np.uint16) for v in (a, b)]
    number = ~np.isnan(a)
    np.testing.assert_array_equal(executed("cvt.rn.bf16.f32 d, a;", [a], ["f32"], "b16")[number], half[0][number])
    packed = executed("cvt.rn.bf16x2.f32 d, a, b;", [a, b], ["f32"] * 2, "b32")
    np.testing.assert_array_equal(packed[number] >> 16, half[0][number])
    np.testing.assert_array_equal(packed & 0xFFFF, half[1])
    widened = executed("add.rn.f32.bf16 d, a, b;", [half[0], b], ["b16", "f32"], "f32")
    np.testing.assert_array_equal(widened[number], (half[0].astype(np.uint32) << 16).view(F32)[number] + b[number])
    halves = executed("cvt.rn.f16x2.f32 d, a, b;", [b, b * 2], ["f32"] * 2, "b32")
    np.testing.assert_array_equal(halves.view(np.float16).reshape(-1, 2), np.stack([b * 2, b], 1).astype(np.float16))


def test_integers_become_the_nearest_bfloat16() -> None:
    # The last but one would be another number if it were rounded to float32 first.
    given = [0, 1, 255, 257, 259, 2**24 + 2**16, 2**24 + 2**16 + 1, 2**32 - 1]
    nearest = [0, 1, 255, 256, 260, 2**24, 2**24 + 2**17, 2**32]
    found = executed("cvt.rn.bf16.u32 d, a;", [np.array(given, np.uint32)], ["u32"], "b16")
    np.testing.assert_array_equal((found.astype(np.uint32) << 16).view(F32), nearest)


ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name", ORDERED)
def test_comparisons_choose(name: str) -> None:
    is_true = ORDERED[name]
    for kind in ("s16", "s32", "u32", "s64"):
        text = f"setp.{name}.{kind} %p1, a, b; selp.b32 d, 5, -7, %p1"
        check(text, [kind, kind], "s32", lambda a, b: 5 if is_true(a, b) else -7)
    for suffix, of_nan in (("", False), ("u", True)):
        text = f"setp.{name}{suffix}.f32 %p1, a, b; selp.f32 d, a, b, %p1"

        def chosen(a: Any, b: Any, of_nan: bool = of_nan) -> Any:
            return a if (of_nan if math.isnan(a) or math.isnan(b) else is_true(a, b)) else b

        check(text, ["f32", "f32"], "f32", chosen)


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_conditions_are_joined(name: str) -> None:
    join = getattr(operator, f"{name}_" if name != "xor" else name)
    text = f"setp.lt.s32 %p1, a, 0; setp.gt.s32 %p2, b, 0; {name}.pred %p3, %p1, %p2; selp.b32 d, 1, 0, %p3"
    check(text, ["s32", "s32"], "s32", lambda a, b: join(a < 0, b > 0))
    text = f"setp.lt.s32 %p1, a, 0; setp.gt.{name}.s32 %p2, b, 0, %p1; selp.b32 d, 1, 0, %p2"
    check(text, ["s32", "s32"], "s32", lambda a, b: join(a < 0, b > 0))


def test_conditions_are_inverted_and_copied() -> None:
    text = "setp.num.f32 %p1, a, b; not.pred %p2, %p1; mov.pred %p3, %p2; selp.b32 d, 1, 0, %p3"
    check(text, ["f32", "f32"], "s32", lambda a, b: math.isnan(a) or math.isnan(b))


def test_inexact_quotients_are_off_by_two_ulp_and_the_same_for_the_same_operands() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 640)).astype(F32)
    a[320:], b[320:] = a[:320], b[:320]
    made = [executed("div.full.f32 d, a, b;", [a, b], ["f32"] * 2, "f32", division_seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[0][:320], made[0][320:])
    errors = made[0].view(np.int32) - (a / b).view(np.int32)
    assert set(errors.tolist()) == {-2, -1, 0, 1, 2}
    assert (made[0] != made[2]).any()
    exact = executed("div.rn.f32 d, a, b;", [a, b], ["f32"] * 2, "f32", division_seed=1)
    np.testing.assert_array_equal(exact, a / b)


def test_a_division_by_zero_is_an_error() -> None:
    zeros = np.zeros(64, np.int32)
    for name in ("div", "rem"):
        with pytest.raises(Undefined, match="division"):
            executed(f"{name}.s32 d, 5, a;", [zeros], ["s32"], "s32")


@pytest.mark.parametrize(
    "text",
    [
        "sin.approx.f32 d, a",
        "add.sat.s32 d, a, a",
        "add.rz.f32 d, a, a",
        "mul.hi.u64 d, a, a",
        "cvt.sat.u16.f32 d, a",
        "fma.rz.f32 d, a, a, a",
        "setp.lt.xnor.s32 %p1, a, a, %p1",
        "bar.red.popc.u32 d, 0, %p1",
        "bar.sync 1",
        "ld.volatile.global.b32 d, [a]",
        "shfl.sync.bfly.b32 d, a, 1, 15, -1",
        "redux.sync.add.s32 d, a, 65535",
    ],
)
def test_an_instruction_that_is_not_known_is_named(text: str) -> None:
    kind = next((kind for kind in ("u64", "f32") if f".{kind} " in text), "s32")
    with pytest.raises(UnknownInstruction) as error:
        executed(f"{text};", [np.zeros(64, dtype_of(kind))], [kind], kind)
    assert text.split()[0] in str(error.value)
