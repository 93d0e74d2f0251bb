"""The emulator of PTX in tests/support/ptx: memory, control and warps, and the errors of kernels that it finds."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import BrokenBarrier, BrokenWarp, EmulationError, Misaligned, OutOfBounds, Race, UnknownInstruction
from ptx_kernels import launched

# Places of the threads' own elements of 4 bytes: %rd1 in the first buffer, %rd2 in the second, %r3 in shared memory.
OWN = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r2, %r2, 64, %r1; shl.b32 %r3, %r1, 2;
    mov.b32 %r4, global_smem; add.s32 %r3, %r3, %r4;
    mad.wide.s32 %rd1, %r2, 4, %rd90;
"""
TWO = OWN + "    mad.wide.s32 %rd2, %r2, 4, %rd91;\n"


def numbers(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.int32) * 7 + 3


def test_each_thread_of_each_block_is_executed() -> None:
    body = """
    mov.u32 %r5, %ntid.x; mov.u32 %r6, %nctaid.x; mad.lo.s32 %r7, %r6, 1000, %r5;
    mov.u32 %r8, %ctaid.x; mad.lo.s32 %r7, %r8, 100000, %r7; st.global.b32 [%rd1], %r7;
    """
    # More blocks than are executed at once.
    (found,) = launched(OWN + body, np.zeros(64 * 300, np.int32), num_blocks=300)
    np.testing.assert_array_equal(found, np.repeat(np.arange(300), 64) * 100_000 + 300_064)


def test_vectors_and_parts_of_numbers_are_loaded_and_stored() -> None:
    body = """
    mad.wide.s32 %rd3, %r1, 16, %rd90; mad.wide.s32 %rd4, %r1, 8, %rd91;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+0]; ld.global.b8 %rs1, [ %rd3 + 4 ];
    cvt.u32.u16 %r11, %rs1; st.global.v2.b32 [%rd4], {%r13, %r11};
    """
    given = np.random.default_rng(0).integers(0, 1 << 32, (64, 4), np.uint32)
    _, found = launched(OWN + body, given, np.zeros((64, 2), np.uint32))
    np.testing.assert_array_equal(found, np.stack([given[:, 3], given[:, 1] & 255], axis=1))


def test_what_was_never_written_is_poison() -> None:
    (found,) = launched(OWN + "@%p7 add.s32 %r9, %r9, 0; st.global.b32 [%rd1], %r9;", np.zeros(64, np.uint32))
    assert set(found.tolist()) == {0xDBDBDBDB}
    body = "setp.lt.s32 %p1, %r1, 10; @%p1 mov.b32 %r9, 1; st.global.b32 [%rd1], %r9;"
    (found,) = launched(OWN + body, np.zeros(64, np.uint32))
    assert found.tolist() == [1] * 10 + [0xDBDBDBDB] * 54
    body = "ld.shared.b32 %r9, [%r3]; st.global.b32 [%rd1], %r9;"
    (found,) = launched(OWN + body, np.zeros(64, np.uint32), shared_nbytes=256)
    assert set(found.tolist()) == {0xDBDBDBDB}
    with pytest.raises(OutOfBounds):
        launched("ld.global.b32 %r1, [%rd5];", np.zeros(64, np.uint32))


def test_each_thread_has_local_memory_of_its_own() -> None:
    body = """
    .local .align 4 .b8 __local_depot0[4]; .reg .b64 %SP; .reg .b64 %SPL;
    mov.u64 %SPL, __local_depot0; cvta.local.u64 %SP, %SPL; cvt.u16.u32 %rs1, %r2; mov.b16 %rs2, 7;
    st.v2.u16 [%SP+0], {%rs1, %rs2}; ld.local.u32 %r5, [%SPL]; st.global.b32 [%rd1], %r5;
    """
    (found,) = launched(OWN + body, np.zeros(64 * 200, np.int32), num_blocks=200)
    np.testing.assert_array_equal(found, np.arange(64 * 200) + (7 << 16))


def test_threads_part_and_meet_again() -> None:
    """A loop of as many rounds as the thread's number says, and a branch of one half of them within."""
    body = """
    mov.b32 %r10, 0; mov.b32 %r11, 0;
    $L_loop:
    setp.ge.s32 %p1, %r10, %r1; @%p1 bra $L_done;
    and.b32 %r12, %r10, 1; setp.eq.s32 %p2, %r12, 0; @!%p2 bra $L_odd;
    add.s32 %r11, %r11, 1; bra.uni $L_next;
    $L_odd:
    add.s32 %r11, %r11, 100;
    $L_next:
    add.s32 %r10, %r10, 1; bra.uni $L_loop;
    $L_done:
    redux.sync.max.s32 %r13, %r11, -1;
    mad.lo.s32 %r11, %r13, 10000, %r11; st.global.b32 [%rd1], %r11;
    """
    (found,) = launched(OWN + body, np.zeros(64, np.int32))
    thread = np.arange(64)
    alone = (thread + 1) // 2 + thread // 2 * 100
    np.testing.assert_array_equal(found, np.repeat(alone.reshape(2, 32).max(axis=1), 32) * 10_000 + alone)


def test_a_table_of_branches_leads_each_thread_to_its_place() -> None:
    body = """
    and.b32 %r10, %r1, 3;
    $L_table: .branchtargets $L_a, $L_b, $L_c, $L_b;
    brx.idx %r10, $L_table;
    $L_a: mov.b32 %r11, 10; bra.uni $L_end;
    $L_b: mov.b32 %r11, 20; bra.uni $L_end;
    $L_c: mov.b32 %r11, 30;
    $L_end: st.global.b32 [%rd1], %r11;
    """
    (found,) = launched(OWN + body, np.zeros(64, np.int32))
    assert found.tolist() == [10, 20, 30, 20] * 16


EXCHANGE = """
    ld.global.b32 %r10, [%rd1]; st.shared.b32 [%r3], %r10; {barrier}
    xor.b32 %r11, %r3, {other}; ld.shared.b32 %r12, [%r11]; st.global.b32 [%rd1], %r12;
"""


def test_a_block_exchanges_values_through_shared_memory() -> None:
    body = OWN + EXCHANGE.format(barrier="bar.sync 0;", other=252)
    (found,) = launched(body, numbers(640), num_blocks=10, shared_nbytes=256)
    np.testing.assert_array_equal(found, numbers(640).reshape(10, 64)[:, ::-1].reshape(-1))
    # Threads that have ended are not waited for.
    ended = OWN + "setp.lt.s32 %p1, %r1, 32; @%p1 ret;" + EXCHANGE.format(barrier="bar.sync 0;", other=4)
    (found,) = launched(ended, numbers(), shared_nbytes=256)
    np.testing.assert_array_equal(found[32:], numbers()[32:].reshape(16, 2)[:, ::-1].reshape(-1))


def test_a_missing_barrier_is_a_race() -> None:
    with pytest.raises(Race, match=r"no barrier between them: ld\.shared\.b32 %r12"):
        launched(OWN + EXCHANGE.format(barrier="", other=252), numbers(), shared_nbytes=256)
    # Within a warp no barrier of the block is needed.
    (found,) = launched(OWN + EXCHANGE.format(barrier="bar.warp.sync -1;", other=4), numbers(), shared_nbytes=256)
    np.testing.assert_array_equal(found, numbers().reshape(32, 2)[:, ::-1].reshape(-1))
    # What another warp has read may not be overwritten, whether it has read before or after other warps.
    everywhere = "st.shared.b32 [%r3], %r1; bar.sync 0; ld.shared.b32 %r12, [global_smem];"
    for first, last in ((0, 31), (32, 63)):
        some = f"setp.ge.s32 %p1, %r1, {first}; setp.le.and.s32 %p2, %r1, {last}, %p1;"
        body = f"{OWN}{everywhere}{some} @%p2 st.shared.b32 [global_smem], 5;"
        with pytest.raises(Race, match=r"no barrier between them: @%p2 st\.shared"):
            launched(body, numbers(), shared_nbytes=256)
    rotated = "st.shared.b32 [%r3], %r1; xor.b32 %r5, %r3, 128; st.shared.b32 [%r5], %r1;"
    with pytest.raises(Race, match="two writes"):
        launched(OWN + rotated, numbers(), shared_nbytes=256)


def test_atomic_sums_are_complete_after_a_barrier() -> None:
    body = """
    setp.lt.s32 %p1, %r1, 8; @%p1 st.shared.b32 [%r3], 0; bar.sync 0;
    and.b32 %r10, %r1, 7; shl.b32 %r10, %r10, 2; atom.shared.add.u32 %r11, [%r10], %r1; {barrier}
    ld.shared.b32 %r12, [%r10]; st.global.b32 [%rd1], %r12;
    """
    for form in ("atom", "atom.relaxed.sys"):
        complete = body.format(barrier="bar.sync 0;").replace("atom", form)
        (found,) = launched(OWN + complete, numbers(), shared_nbytes=256)
        np.testing.assert_array_equal(found, np.tile(np.arange(64).reshape(8, 8).sum(axis=0), 8))
    with pytest.raises(Race):
        launched(OWN + body.format(barrier=""), numbers(), shared_nbytes=256)


def test_different_values_of_one_instruction_for_one_place_are_a_race() -> None:
    (found,) = launched("st.global.b32 [%rd90], 5;", np.zeros(1, np.int32))
    assert found.tolist() == [5]
    for body in ("st.global.b32 [%rd90], %r1;", "st.shared.b32 [global_smem], %r1;"):
        with pytest.raises(Race, match="different values"):
            launched(OWN + body, np.zeros(64, np.int32), shared_nbytes=256)


def test_an_access_outside_of_a_buffer_is_found() -> None:
    read, write = "ld.global.b32 %r10, [%rd1{}];", "st.global.b32 [%rd1{}], %r1;"
    for text, offset, buffer in ((read, 4, 64), (write, 4, 64), (read, -4, 64), (write, 0, 63)):
        # Before the first byte there may be no buffer, as the memory lies.
        message = rf"4 bytes at byte (256|-4|252) of buffer 0, which has {4 * buffer}|an address in no buffer"
        with pytest.raises(OutOfBounds, match=message):
            launched(OWN + text.format(f"+{offset}"), np.zeros(buffer, np.int32), np.zeros(64, np.int32))
    # The end of a vector, too, and memory of others.
    with pytest.raises(OutOfBounds):
        launched("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd90];", np.zeros(15, np.uint8))
    with pytest.raises(OutOfBounds, match="no buffer"):
        launched("add.s64 %rd1, %rd90, -1099511627776; ld.global.b32 %r1, [%rd1];", np.zeros(64, np.uint8))
    for text in ("ld.shared.b32 %r5, [%r3+4];", "st.shared.b32 [%r3+-4], %r1;"):
        with pytest.raises(OutOfBounds, match="of shared memory, which has 256"):
            launched(OWN + text, numbers(), shared_nbytes=256)
    # A thread that is not to read may have any address.
    launched(OWN + "setp.lt.s32 %p1, %r1, 63; @%p1 ld.global.b32 %r10, [%rd1+4];", numbers())


def test_a_misaligned_access_is_found() -> None:
    room = np.zeros(65, np.int64)
    assert room.ctypes.data % 16 == 0
    for text in ("ld.global.b32 %r5, [%rd90+2];", "st.global.b16 [%rd90+1], 0;"):
        with pytest.raises(Misaligned):
            launched(text, room)
    vector = "ld.global.v2.b32 {%r5, %r6}, [%rd90+8];"
    launched(vector, room)
    # As aligned as the buffer is.
    with pytest.raises(Misaligned, match="8 bytes at an address that is 4 beyond"):
        launched(vector, room.view(np.int32)[1:])
    with pytest.raises(Misaligned):
        launched(OWN + "st.shared.v2.b32 [%r3], {%r1, %r1};", room, shared_nbytes=512)


HALF = "setp.lt.s32 %p1, %r1, 16; @%p1 bra $L_end; {}; $L_end: st.global.b32 [%rd1], %r10;"


@pytest.mark.parametrize(
    "text",
    [
        "shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1",
        "vote.sync.ballot.b32 %r10, %p1, -1",
        "redux.sync.add.s32 %r10, %r1, -1",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [global_smem]",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [global_smem], {%r1}",
        "bar.warp.sync -1",
    ],
)
def test_instructions_of_warps_need_whole_warps(text: str) -> None:
    with pytest.raises(BrokenWarp, match=text.split()[0].replace(".", r"\.")):
        launched(OWN + HALF.format(text), numbers(), shared_nbytes=256)


def test_a_barrier_needs_all_threads_that_have_not_ended() -> None:
    body = "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L_other; bar.sync 0; ret; $L_other: bar.sync 0;"
    with pytest.raises(BrokenBarrier, match="different barriers"):
        launched(OWN + body, numbers())


def test_warps_exchange_registers() -> None:
    thread = np.arange(64).reshape(2, 32)
    sources = {
        "bfly.b32 %r10, %r1, 5, 31": thread ^ 5,
        "up.b32 %r10, %r1, 3, 0": np.where(thread % 32 >= 3, thread - 3, thread),
        "down.b32 %r10, %r1, 8, 31": np.where(thread % 32 < 24, thread + 8, thread),
        "idx.b32 %r10, %r1, 7, 31": thread // 32 * 32 + 7,
        "idx.b32 %r10, %r1, %r5, 31": thread // 32 * 32 + 31 - thread % 32,
    }
    opposite = "not.b32 %r5, %r1; and.b32 %r5, %r5, 31;"
    for text, expected in sources.items():
        (found,) = launched(f"{OWN}{opposite} shfl.sync.{text}, -1; st.global.b32 [%rd1], %r10;", numbers())
        np.testing.assert_array_equal(found, expected.reshape(-1), text)


def test_warps_vote_and_reduce() -> None:
    given = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, 64).astype(np.int32)
    body = TWO + "ld.global.b32 %r10, [%rd1]; mov.b32 %r12, -1; {} st.global.b32 [%rd2], %r11;"
    text = "setp.lt.s32 %p1, %r10, 0; vote.sync.ballot.b32 %r11, %p1, -1;"
    found = launched(body.format(text), given, np.zeros(64, np.uint32))[1]
    bits = [sum(int(number < 0) << lane for lane, number in enumerate(warp)) for warp in given.reshape(2, 32)]
    assert found.tolist() == np.repeat(bits, 32).tolist()
    for name, made in (("min", np.min), ("max", np.max), ("add", lambda a, axis: a.sum(axis, np.int32))):
        text = f"redux.sync.{name}.s32 %r11, %r10, %r12;"
        found = launched(body.format(text), given, np.zeros(64, np.int32))[1]
        np.testing.assert_array_equal(found, np.repeat(made(given.reshape(2, 32), axis=1), 32))


def test_matrices_are_spread_over_a_warp() -> None:
    """Four matrices of 8 by 8 halves: thread i gives the address of row i, and has two of row i // 4 of each."""
    given = np.random.default_rng(0).integers(0, 1 << 32, (4, 8, 4), np.uint32)
    body = """
    mad.wide.s32 %rd3, %r1, 16, %rd90; mad.wide.s32 %rd4, %r1, 16, %rd91; shl.b32 %r5, %r1, 4;
    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3]; st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};
    bar.warp.sync -1; xor.b32 %r6, %r5, 112;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r6];
    st.global.v4.b32 [%rd4], {%r20, %r21, %r22, %r23};
    """
    _, found = launched(OWN + body, given, np.zeros((32, 4), np.uint32), num_threads=32, shared_nbytes=512)
    reversed_rows = given[:, ::-1].reshape(4, 32)
    np.testing.assert_array_equal(found, reversed_rows.T)
    back = body.replace("ldmatrix", "bar.warp.sync -1; stmatrix").replace(
        "{%r20, %r21, %r22, %r23}, [%r6]", "[%r6], {%r10, %r11, %r12, %r13}"
    )
    back = back.replace("st.global", "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5]; st.global")
    _, found = launched(OWN + back, given, np.zeros((4, 8, 4), np.uint32), num_threads=32, shared_nbytes=512)
    mine = given.reshape(32, 4)
    np.testing.assert_array_equal(found[:, ::-1].reshape(4, 32), mine.T)
    with pytest.raises(Misaligned, match="row of a matrix"):
        launched(
            OWN + body.replace("xor.b32 %r6, %r5, 112", "add.s32 %r6, %r5, -4"),
            given,
            np.zeros((32, 4), np.uint32),
            num_threads=32,
            shared_nbytes=512,
        )


def test_every_error_names_the_instruction() -> None:
    with pytest.raises(UnknownInstruction, match=r"vadd\.u32\.u32\.u32 %r1, %r1, %r1, 0"):
        launched("vadd.u32.u32.u32 %r1, %r1, %r1, 0;", numbers())
    errors = {BrokenBarrier, BrokenWarp, Misaligned, OutOfBounds, Race, UnknownInstruction}
    assert all(issubclass(error, EmulationError) for error in errors)
