"""Executes on the CPU what Triton compiles for NVIDIA GPUs: PTX, by NumPy, on the threads of many blocks at once.

`emulation` launches Triton kernels this way, and `machine.run` any kernel of PTX. Of all threads that can continue,
those at the first instruction do. Registers that nothing was written to hold 0xDB bytes, so that results show where
they are used. Every access to memory is checked. Not shown: speed, ptxas, the order in which blocks see each other's
writes, and a missing barrier within a warp, whose threads run in lockstep here.
"""


class EmulationError(Exception):
    """A kernel does what no kernel may do, or what only some GPUs do. A note names the instruction."""


class UnknownInstruction(EmulationError):
    """The emulator has no such instruction."""


class OutOfBounds(EmulationError):
    """An access outside of a buffer, or of shared memory."""


class Misaligned(EmulationError):
    """An access at an address that is no multiple of its size."""


class Race(EmulationError):
    """Threads access the same memory with no barrier between them, one of them at least to write."""


class BrokenWarp(EmulationError):
    """An instruction for whole warps, executed by some threads of a warp."""


class BrokenBarrier(EmulationError):
    """Threads of a block wait at different barriers."""


class Undefined(EmulationError):
    """A result that PTX does not define."""
