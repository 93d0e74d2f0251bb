"""A stand-in for CUDA on the CPU: streams that lag behind the host and run in any order that their events allow.

Inside `with Simulation():`, torch has two CUDA devices. Their tensors are `DeviceTensor`s. An operation on them is
queued, and runs when the host waits or time passes: one operation at a time, of streams drawn from a seed. Freed memory
is given away in the order of the stream that owns it, and new memory is overwritten first. What a device refuses is
refused: `numpy()`, and tensors of the host or of another device in one operation.

Counted: `waits` of the host, `copies` to the devices and their bytes, and `unordered` uses: work on memory that another
stream has written, or that it reads and this work writes, without a wait between them. A wait for what cannot happen is
an AssertionError. Not shown: time, and what CUDA itself does.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shardio.augment.erasing import _quantiles
from shardio.augment.resample import affine_on
from shardio.loading.cuda import _copy_stream

SPOILED = 0xDB
NUM_DEVICES = 2
_CYCLES = 1_000_000  # of `torch.cuda._sleep`, in one operation
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MOVES = {"to", "cuda", "pin_memory", "is_pinned"}
_CACHES = (_copy_stream, affine_on, _quantiles)


class Simulation:
    """Two devices. Time passes only when the host queries or waits; 1.0 milliseconds for each operation.

    `haste` is how likely an operation is to run when an event is queried: 0.0 makes a device that does nothing unless
    the host waits for it. For one thread.
    """

    def __init__(self, seed: int = 0, haste: float = 0.4) -> None:
        self.rng = random.Random(seed)
        self.haste = haste
        self.now = 0.0
        self.waits: Counter[str] = Counter()
        self.sync_debug_mode = "default"
        self.copies = self.copied_nbytes = 0
        self.unordered: list[str] = []
        self.allocated = self.most_allocated = 0
        self.slow: Stream | None = None  # runs only when no other stream can
        self.streams: list[Stream] = []
        self.device = 0
        self.current = [Stream(self, number) for number in range(NUM_DEVICES)]
        self.default = self.current[0]
        self.known: dict[Stream, int] = {}  # how far the host knows that streams have come
        self._pinned: set[StorageWeakRef] = set()
        self._freed: list[tuple[_Block, list[_Mark]]] = []
        self._graph: Graph | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Simulation:
        names = {
            "is_available": lambda: True,
            "device_count": lambda: NUM_DEVICES,
            "current_device": lambda: self.device,
            "get_device_name": lambda device=None: "a stand-in for CUDA",
            "device": self._on_device,
            "Stream": lambda device=None: Stream(self, self._index(device)),
            "Event": lambda **options: Event(self, **options),
            "current_stream": lambda device=None: self.current[self._index(device)],
            "stream": self.stream,
            "set_stream": lambda stream: self.current.__setitem__(stream.index, stream),
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_debug_mode", mode),
            "get_rng_state": lambda device: torch.empty(0),
            "set_rng_state": lambda state, device: None,
            "synchronize": lambda device=None: self.wait("synchronize", self.streams),
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.most_allocated,
            "reset_peak_memory_stats": lambda device=None: setattr(self, "most_allocated", self.allocated),
            "CUDAGraph": lambda: Graph(self),
            "graph": self._capture,
            "_sleep": lambda cycles: [self.launch(lambda: None) for _ in range(-(-cycles // _CYCLES))],
        }
        for cache in _CACHES:  # which know an earlier device
            cache.cache_clear()
            self._stack.callback(cache.cache_clear)
        self._stack.enter_context(mock.patch.multiple(torch.cuda, **names))
        # A parameter of the host cannot become one of the device in place.
        self._stack.enter_context(mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True))
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        return self.device if index is None else index

    @contextlib.contextmanager
    def _on_device(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, self._index(device)
        try:
            yield
        finally:
            self.device = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self._on_device(stream.index):
            before, self.current[stream.index] = self.current[stream.index], stream
            try:
                yield
            finally:
                self.current[stream.index] = before

    @contextlib.contextmanager
    def _capture(self, graph: Graph) -> Iterator[None]:
        with self.stream(Stream(self, self.device)):
            self._graph = graph
            try:
                yield
            finally:
                self._graph = None

    # Work, and the passing of time.

    def launch(
        self,
        work: Callable[[], object],
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        when: Callable[[], bool] = lambda: True,
        index: int | None = None,
    ) -> None:
        """Queues work that uses device tensors, on the current stream of a device. It starts once `when` is true."""
        blocks = [one.memory.block for one in reads], [one.memory.block for one in writes]
        stream = self.current[self.device if index is None else index]
        if self._graph is not None:
            self._graph.work.append((work, *blocks))
        else:
            self.enqueue(stream, work, *blocks, when)

    def enqueue(
        self,
        stream: Stream,
        work: Callable[[], object],
        reads: list[_Block],
        writes: list[_Block],
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        _learn(stream.known, self.known)
        stream.known[stream] = stream.known.get(stream, 0) + 1
        for blocks, is_write in ((reads, False), (writes, True)):
            for block in blocks:
                if not block.note_use(stream, is_write):
                    self.unordered.append(f"a {'write' if is_write else 'read'} on stream {self.streams.index(stream)}")
        stream.queue.append((when, work))

    def step(self) -> bool:
        """Runs one operation. Returns False if there is none that may run."""
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        fast = [stream for stream in ready if stream is not self.slow]
        _, work = self.rng.choice(fast or ready).queue.popleft()
        self.now += 1.0
        with torch._C.DisableTorchFunction(), torch.no_grad():
            work()
        return True

    def let_time_pass(self) -> None:
        while self.rng.random() < self.haste and self.step():
            pass

    def wait_until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.step(), "the host waits for what cannot happen"

    def wait(self, why: str, streams: list[Stream]) -> None:
        """Has the host wait for all work of some streams."""
        assert self._graph is None, f"{why}: not while a graph is captured"
        self.waits[why] += 1
        if self.sync_debug_mode == "warn" and why != "synchronize":
            warnings.warn(f"called a synchronizing CUDA operation: {why}", stacklevel=2)
        self.wait_until(lambda: not any(stream.queue for stream in streams))
        for stream in streams:
            _learn(self.known, stream.known)

    def synchronize(self) -> None:
        """Lets all work happen. Not a wait of the program that is tested."""
        self.wait_until(lambda: not any(stream.queue for stream in self.streams))

    # Memory.

    def allocate(self, nbytes: int, stream: Stream) -> _Block:
        waiting, self._freed = self._freed, []
        for block, marks in waiting:
            self.free(block, marks)
        nbytes = -(-nbytes // 512) * 512  # as torch's allocator does
        pool = stream.free_blocks
        fitting = [block for block in pool if len(block.memory) == nbytes]
        block = fitting[-1] if fitting else _Block(stream, nbytes)
        if fitting:
            pool.remove(block)
        self.allocated += nbytes
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: _Block, marks: list[_Mark]) -> None:
        if all(mark.passed for mark in marks):
            for mark in marks:  # the allocator has waited for them
                block.forget(mark.stream)
            block.owner.free_blocks.append(block)
            self.allocated -= len(block.memory)
        else:
            self._freed.append((block, marks))

    def new(self, like: torch.Tensor, index: int) -> DeviceTensor:
        """Returns a tensor with the shape, strides and dtype of `like`, in memory that is overwritten first."""
        extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        nbytes = (extent if like.numel() else 0) * like.dtype.itemsize
        memory = _Allocation(self, nbytes, index)
        if self._graph is not None:
            self._graph.kept.append(memory)
        raw = memory.block.memory[:nbytes]
        # Before autograd and inference mode: as torch's own memory, it belongs to none of them.
        with torch.inference_mode(False):
            value = raw.view(like.dtype).as_strided(like.shape, like.stride())
        made = DeviceTensor(memory, value)
        self.launch(lambda: raw.fill_(SPOILED), writes=[made], index=index)
        return made

    def copy_in(self, to: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Copies from the host. Without pinned memory, the host waits."""
        self.copies += 1
        self.copied_nbytes += source.nbytes
        value, index = to.value, to.memory.index
        self.launch(lambda: value.copy_(source), writes=[to], index=index)
        if not non_blocking or not self.is_pinned(source):
            self.wait("copy from the host", [self.current[index]])

    def upload(self, source: torch.Tensor, device: Any, non_blocking: bool = False) -> DeviceTensor:
        made = self.new(source, self._index(device))
        self.copy_in(made, source.detach(), non_blocking)
        return made

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._pinned

    # Operations of torch.

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Does an operation of ATen whose arguments have a DeviceTensor."""
        some = _tensors((args, kwargs))
        ours = [one for one in some if isinstance(one, DeviceTensor)]
        on_host = [one for one in some if one.ndim and not isinstance(one, DeviceTensor)]
        index = ours[0].memory.index
        args_of, kwargs_of = _changed((args, kwargs), lambda one: getattr(one, "value", one))
        if func is torch.ops.aten.copy_.default and on_host:
            if not isinstance(args[0], DeviceTensor):
                args[0].copy_(args[1].cpu())
            else:
                self.copy_in(args[0], args[1], *args[2:3] or (kwargs.get("non_blocking", False),))
            return args[0]
        if on_host or any(one.memory.index != index for one in ours):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found others than cuda:{index}")
        if func.is_view:
            with torch.inference_mode(ours[0].is_inference()):  # as torch expects of a view
                views = func(*args_of, **kwargs_of)
                return _changed(views, lambda view: DeviceTensor(ours[0].memory, view))
        is_index = func.name().startswith("aten::index")
        if _NEEDS_VALUES & set(func.tags) and not (is_index and all(one.dtype != torch.bool for one in ours[1:])):
            self.wait(func.name(), [self.current[index]])
            found = func(*args_of, **kwargs_of)
            return _changed(found, lambda one: self._filled(one, index))
        written = _written(func, args, kwargs)
        if written:
            self.launch(lambda: func(*args_of, **kwargs_of), ours, written, index=index)
            return written[0] if func._schema.returns else None
        meta_args, meta_kwargs = _changed((args, kwargs), _meta)
        made = _changed(func(*meta_args, **meta_kwargs), lambda one: self.new(one, index))
        results = _tensors(made)
        places = [one.value for one in results if isinstance(one, DeviceTensor)]

        def work() -> None:
            for place, one in zip(places, _tensors(func(*args_of, **kwargs_of)), strict=True):
                place.copy_(one)

        self.launch(work, ours, results, index=index)
        return made

    def _filled(self, values: torch.Tensor, index: int) -> DeviceTensor:
        made = self.new(values, index)
        value = made.value
        self.launch(lambda: value.copy_(values), writes=[made], index=index)
        return made

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch, for a device if its arguments say so."""
        name = getattr(func, "__name__", "")
        if name in _MOVES and not isinstance(args[0], DeviceTensor):
            source, *rest = args
            if name == "is_pinned":
                return self.is_pinned(source)
            if name == "pin_memory":
                return self.pin(source.clone())
            devices = [one for one in (*rest, kwargs.get("device")) if isinstance(one, str | torch.device)]
            if name == "cuda" or (devices and torch.device(devices[0]).type == "cuda"):
                assert not set(kwargs) - {"device", "non_blocking"}, "a cast on the way to the device"
                return self.upload(source, *devices or [None], non_blocking=kwargs.get("non_blocking", False))
        device = kwargs.get("device") if kwargs else None
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            made = func(*args, **{**kwargs, "device": "cpu"})
            if name in ("tensor", "as_tensor"):
                return self.upload(made, device)
            index = self._index(device)
            return self.new(made, index) if name.startswith("empty") else self._filled(made, index)
        if kwargs and kwargs.get("pin_memory"):
            return self.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


class _Mode(TorchFunctionMode):
    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._simulation.function(func, args, kwargs or {})


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the arguments that an operation changes."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in the arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [one for part in parts for one in _tensors(part)]


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns arguments or results with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(part, change) for name, part in value.items()}
    return type(value)(_changed(part, change) for part in value) if isinstance(value, tuple | list) else value


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Block:
    """Memory of a device, with the last uses of each stream."""

    def __init__(self, owner: Stream, nbytes: int) -> None:
        self.owner = owner
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self._reads: dict[Stream, int] = {}
        self._writes: dict[Stream, int] = {}

    def note_use(self, stream: Stream, is_write: bool) -> bool:
        """Returns whether the stream has waited for the uses before this one."""
        before = [*self._writes.items(), *(self._reads.items() if is_write else ())]
        (self._writes if is_write else self._reads)[stream] = stream.known[stream]
        return all(stream.known.get(other, 0) >= number for other, number in before)

    def forget(self, stream: Stream) -> None:
        self._reads.pop(stream, None)
        self._writes.pop(stream, None)


class _Allocation:
    def __init__(self, simulation: Simulation, nbytes: int, index: int) -> None:
        self.simulation = simulation
        self.index = index
        self.block = simulation.allocate(nbytes, simulation.current[index])
        self.used_on: set[Stream] = set()

    def __del__(self) -> None:
        events = [stream.record_event() for stream in self.used_on]
        self.simulation.free(self.block, [event.mark for event in events if event.mark])


class DeviceTensor(torch.Tensor):
    """A tensor on a device. Queued work knows its memory but does not keep it from being freed, as with CUDA."""

    memory: _Allocation
    value: torch.Tensor
    """The tensor in the host's memory, as far as work has run."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: _Allocation, value: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, value.shape, strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype
        )
        made.memory, made.value = memory, value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = next(one for one in _tensors((args, kwargs)) if isinstance(one, DeviceTensor))
        return one.memory.simulation.call(func, args, kwargs or {})

    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.memory.index)

    def cpu(self, *_: Any) -> torch.Tensor:
        simulation = self.memory.simulation
        simulation.wait("copy to the host", [simulation.current[self.memory.index]])
        return self.value.clone()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = next((one for one in args if isinstance(one, str | torch.device)), kwargs.pop("device", None))
        rest = [one for one in args if not isinstance(one, str | torch.device)]
        there = self if device is None or torch.device(device).type == "cuda" else self.cpu()
        if there is self and not rest and not kwargs:
            return self
        return super().to(*rest, **kwargs) if there is self else there.to(*rest, **kwargs)

    def cuda(self, *_: Any, **__: Any) -> DeviceTensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy: use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.memory.used_on.add(stream)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class Graph:
    """Captured work. Its memory is not given to others."""

    def __init__(self, simulation: Simulation) -> None:
        self.work: list[tuple[Callable[[], object], list[_Block], list[_Block]]] = []
        self.kept: list[_Allocation] = []
        self._simulation = simulation

    def replay(self) -> None:
        simulation = self._simulation
        for work in self.work:
            simulation.enqueue(simulation.current[simulation.device], *work)


class _Mark:
    """One recording of an event."""

    def __init__(self, stream: Stream) -> None:
        self.passed = False
        self.time = 0.0
        self.stream = stream
        self.known = dict(stream.known)
        _learn(self.known, stream.simulation.known)


class Stream:
    def __init__(self, simulation: Simulation, index: int = 0) -> None:
        self.simulation = simulation
        self.index = index
        self.device = torch.device("cuda", index)
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self.free_blocks: list[_Block] = []
        self.known: dict[Stream, int] = {}  # how far it has waited for streams
        simulation.streams.append(self)

    def query(self) -> bool:
        self.simulation.let_time_pass()
        return not self.queue

    def synchronize(self) -> None:
        self.simulation.wait("stream", [self])

    def record_event(self) -> Event:
        event = Event(self.simulation)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if mark := event.mark:  # the recording of now: a later one does not matter
            _learn(self.known, mark.known)
            self.queue.append((lambda: mark.passed, lambda: None))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    def __init__(self, simulation: Simulation, enable_timing: bool = False, blocking: bool = False) -> None:
        self._simulation = simulation
        self._enable_timing = enable_timing
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._simulation.current[self._simulation.device]
        mark = self.mark = _Mark(stream)

        def run() -> None:
            mark.passed = True
            mark.time = self._simulation.now

        stream.queue.append((lambda: True, run))

    def query(self) -> bool:
        self._simulation.let_time_pass()
        return self._has_passed()

    def synchronize(self) -> None:
        self._simulation.waits["event"] += 1
        self._simulation.wait_until(self._has_passed)

    def _has_passed(self) -> bool:
        if self.mark is not None and self.mark.passed:
            _learn(self._simulation.known, self.mark.known)
        return self.mark is None or self.mark.passed

    def elapsed_time(self, end_event: Event) -> float:
        begin, end = self.mark, end_event.mark
        assert self._enable_timing
        assert end_event._enable_timing
        assert begin is not None
        assert end is not None
        assert begin.passed
        assert end.passed
        return end.time - begin.time


def _learn(known: dict[Stream, int], more: dict[Stream, int]) -> None:
    for stream, number in more.items():
        known[stream] = max(known.get(stream, 0), number)
