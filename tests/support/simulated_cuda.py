"""CUDA on the CPU, as far as shardio.loading.cuda needs it: streams that lag behind the host and run in any order
that their events allow, and an allocator that gives freed memory away in the order of the stream to which it belongs.

Queued work runs one operation at a time, of streams drawn from a seed, when the host waits or time passes. Memory
knows the last tensor for which it was used: an operation of an earlier one that comes after is an AssertionError, and
so is waiting for what cannot happen. New memory is overwritten, in the order of its stream.

This shows that the calls have the right order if they mean what is assumed here. On a GPU,
tests/loading/test_gpu.py checks what they mean.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from shardio.loading.cuda import _copy_stream

SPOILED = 0xDB


class Simulation:
    """One device. Time passes only when the host queries or waits; 1.0 milliseconds for each operation.

    `haste` is how likely an operation is to run when an event is queried: 0.0 makes a device that does nothing unless
    the host waits for it.
    """

    def __init__(self, seed: int = 0, haste: float = 0.4) -> None:
        self.rng = random.Random(seed)
        self.haste = haste
        self.now = 0.0
        self.streams: list[Stream] = []
        self.slow: Stream | None = None  # runs only when no other stream can
        self.default = self.current = Stream(self)
        self.allocated = self.most_allocated = 0
        self._freed: list[tuple[_Block, list[_Mark]]] = []

    def torch(self) -> SimpleNamespace:
        """Stands in for the module of that name in shardio.loading.cuda, which forgets earlier simulations."""
        _copy_stream.cache_clear()
        cuda = SimpleNamespace(
            Stream=lambda device: Stream(self),
            Event=lambda **options: Event(self, **options),
            current_stream=lambda device: self.current,
            stream=self.stream,
        )
        types = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}
        return SimpleNamespace(cuda=cuda, empty=self.empty, inference_mode=torch.inference_mode, **types)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, device: str, pin_memory: bool = False
    ) -> Tensor | torch.Tensor:
        if device == "cpu":
            assert pin_memory
            return torch.empty(shape, dtype=dtype)
        return Tensor(_Allocation(self, torch.Size(shape).numel() * dtype.itemsize), shape, dtype)

    def allocate(self, nbytes: int) -> _Block:
        waiting, self._freed = self._freed, []
        for block, marks in waiting:
            self.free(block, marks)
        pool = self.current.free_blocks
        fitting = [block for block in pool if len(block.memory) == nbytes]
        block = fitting[-1] if fitting else _Block(self.current, torch.empty(nbytes, dtype=torch.uint8))
        if fitting:
            pool.remove(block)
        block.tensors += 1
        self.allocated += nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: _Block, marks: list[_Mark]) -> None:
        if all(mark.passed for mark in marks):
            block.owner.free_blocks.append(block)
            self.allocated -= len(block.memory)
        else:
            self._freed.append((block, marks))

    def launch(self, work: Callable[..., None], *tensors: Tensor, when: Callable[[], bool] = lambda: True) -> None:
        """Queues work that uses the tensors' values, on the current stream. It starts once `when` is true."""
        uses = [(tensor.block, tensor.block.tensors, tensor.value) for tensor in tensors]

        def run() -> None:
            for block, number, _ in uses:
                block.use(number)
            work(*(value for _, _, value in uses))

        self.current.queue.append((when, run))

    def step(self) -> bool:
        """Runs one operation. Returns False if there is none that may run."""
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        fast = [stream for stream in ready if stream is not self.slow]
        _, run = self.rng.choice(fast or ready).queue.popleft()
        self.now += 1.0
        run()
        return True

    def let_time_pass(self) -> None:
        while self.rng.random() < self.haste and self.step():
            pass

    def wait_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.step(), "the host waits for what cannot happen"

    def synchronize(self) -> None:
        self.wait_until(lambda: not any(stream.queue for stream in self.streams))


class _Block:
    def __init__(self, owner: Stream, memory: torch.Tensor) -> None:
        self.owner = owner
        self.memory = memory
        self.tensors = 0
        self._last_used = 0

    def use(self, tensor: int) -> None:
        assert tensor >= self._last_used, "memory was used by a tensor after it had been used by a later one"
        self._last_used = tensor


class _Allocation:
    def __init__(self, simulation: Simulation, nbytes: int) -> None:
        self.block = simulation.allocate(nbytes)
        self.used_on: set[Stream] = set()
        self._simulation = simulation

    def __del__(self) -> None:
        marks = [Event(self._simulation) for _ in self.used_on]
        for event, stream in zip(marks, self.used_on, strict=True):
            event.record(stream)
        self._simulation.free(self.block, [event.mark for event in marks if event.mark])


class Tensor:
    """A tensor on the device. Operations know its memory but do not keep it from being freed, as with CUDA."""

    device = torch.device("cuda")

    def __init__(
        self, allocation: _Allocation, shape: tuple[int, ...], dtype: torch.dtype, value: torch.Tensor | None = None
    ) -> None:
        self._allocation = allocation
        self.block = allocation.block
        self.dtype = dtype
        self.value = self.block.memory.view(dtype).view(shape) if value is None else value
        if value is None:
            allocation._simulation.launch(lambda new: new.view(torch.uint8).fill_(SPOILED), self)

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    def __len__(self) -> int:
        return len(self.value)

    def _view(self, value: torch.Tensor) -> Tensor:
        return Tensor(self._allocation, value.shape, value.dtype, value)

    def __getitem__(self, part: slice | int) -> Tensor:
        return self._view(self.value[part])

    def view(self, how: tuple[int, ...] | torch.dtype) -> Tensor:
        return self._view(self.value.view(how))  # type: ignore[arg-type]

    def permute(self, *axes: int) -> Tensor:
        return self._view(self.value.permute(*axes))

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        assert source.shape == self.shape
        self._allocation._simulation.launch(lambda value: value.copy_(source), self)

    def record_stream(self, stream: Stream) -> None:
        self._allocation.used_on.add(stream)


class _Mark:
    """One recording of an event."""

    passed = False
    time = 0.0


class Stream:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.free_blocks: list[_Block] = []
        simulation.streams.append(self)

    def record_event(self) -> Event:
        event = Event(self.simulation)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        mark = event.mark  # the recording of now: a later one does not matter
        self.queue.append((lambda: mark is None or mark.passed, lambda: None))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, simulation: Simulation, enable_timing: bool = False, blocking: bool = False) -> None:
        self._simulation = simulation
        self._enable_timing = enable_timing
        self.mark: _Mark | None = None

    def record(self, stream: Stream) -> None:
        mark = self.mark = _Mark()

        def run() -> None:
            mark.passed = True
            mark.time = self._simulation.now

        stream.queue.append((lambda: True, run))

    def query(self) -> bool:
        self._simulation.let_time_pass()
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        self._simulation.wait_until(lambda: self.mark is None or self.mark.passed)

    def elapsed_time(self, end_event: Event) -> float:
        begin, end = self.mark, end_event.mark
        assert self._enable_timing
        assert end_event._enable_timing
        assert begin is not None
        assert end is not None
        assert begin.passed
        assert end.passed
        return end.time - begin.time
