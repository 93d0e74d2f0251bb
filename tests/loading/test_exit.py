"""Interpreters that end with a loader at work: at once, with the exit code they should have, and without a word more.

Each script runs in an interpreter of its own, with warnings as errors.
"""

from __future__ import annotations

import re
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import until
from interpreters import Interpreter

Start = Callable[..., Interpreter]

# A hang shows itself with the stacks of all threads before the test gives up.
HANG_SECONDS = 30
DEADLINE_SECONDS = 45

WATCHDOG = f"""
import faulthandler
faulthandler.dump_traceback_later({HANG_SECONDS}, exit=True)
"""
PROLOGUE = """
import os, sys, threading
from shardio import ShardLoader
path = sys.argv[1]
"""


@pytest.fixture
def begin(start: Callable[[str, Path], Interpreter], make_set: Callable[..., Path]) -> Start:
    """begin(script): an interpreter that runs the script, with a set's path in `path`."""
    path = make_set(1000, (4, 4, 3), 300)
    return lambda script, prologue=WATCHDOG + PROLOGUE: start(prologue + script, path)


def finish(process: Interpreter) -> tuple[int | None, str, str]:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, out, err


def interrupt_when_ready(process: Interpreter) -> None:
    """Ctrl-C when the script has written a line, and its main thread waits for something.

    A signal that arrives when a thread is about to wait, but does not yet, is not noticed before the wait ends. CPython
    has no way around that.
    """
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_SECONDS)
    assert ready, "the script did not get ready"
    assert process.stdout.readline() == "ready\n", finish(process)
    stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")  # asleep
    process.send_signal(signal.SIGINT)


def check_traceback(err: str, last_line: str) -> None:
    """One traceback and nothing else: no second error, no thread's complaint, no `Exception ignored`."""
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):", err
    assert re.fullmatch(last_line, lines[-1]), err
    assert err.count("Traceback") == 1, err
    assert "ignored" not in err, err
    assert "shardio-gather" not in err, err


ENDS = {
    "in the middle of an epoch": """
iterator = iter(ShardLoader(path, 4, device="cpu", prefetch=8))
for _ in range(3):
    images, labels = next(iterator)
assert len(iterator) == 247
""",
    "by sys.exit in the loop": """
with ShardLoader(path, 4, device="cpu") as loader:
    for images, labels in loader:
        sys.exit(3)
""",
    "with forgotten iterators and held batches": """
import builtins
import torch
loaders = [ShardLoader(path, 4, device="cpu", num_threads=n) for n in (1, 2, 3)]
iterators = [iter(loader) for loader in loaders for _ in range(2)]
held = [next(iterator) for iterator in iterators for _ in range(3)]
held.append(held)                       # a cycle
builtins.kept = next(iterators[0])      # outlives this module
torch.kept = next(iterators[1])[0][1:]  # outlives most modules
sys.kept = [iterators[2], loaders[0]]
loaders[2].close()
abandoned = ShardLoader(path, 4, device="cpu")
next(iter(abandoned))
del abandoned

def generator():
    for batch in ShardLoader(path, 4, device="cpu"):
        yield batch

suspended = generator()
next(suspended)
""",
    "with a finalizer that was cut off": """
import weakref
loader = ShardLoader(path, 4, device="cpu", num_threads=2)
iterator = iter(loader)
next(iterator)
weakref.finalize._registry.clear()  # as if a signal handler had raised SystemExit before its turn
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_may_end_whatever_its_loader_does(how: str, begin: Start) -> None:
    code = 3 if "sys.exit" in how else 0
    assert finish(begin(ENDS[how])) == (code, "", "")


@pytest.mark.parametrize(
    ("broken", "loop", "error"),
    [
        ("", "raise ArithmeticError('loss is nan')", "ArithmeticError: loss is nan"),
        ("MappedReader.copy = lambda *arguments: os.stat('/gone')", "pass", "FileNotFoundError: .*'/gone'"),
    ],
    ids=["in the loop", "in a gather thread"],
)
def test_an_error_is_all_that_is_printed(broken: str, loop: str, error: str, begin: Start) -> None:
    script = f"""
from shardio.reading.reader import MappedReader
{broken}
for images, labels in ShardLoader(path, 4, device="cpu", num_threads=2):
    {loop}
"""
    code, out, err = finish(begin(script))
    assert (code, out) == (1, "")
    check_traceback(err, error)


def test_ctrl_c_while_it_waits_for_a_batch_ends_it(begin: Start) -> None:
    script = """
from shardio.reading.reader import MappedReader
go_on = threading.Event()
copy = MappedReader.copy
def slow(reader, name, indices, *out):
    print("ready", flush=True)
    go_on.wait()
    copy(reader, name, indices, *out)
MappedReader.copy = slow
loader = ShardLoader(path, 4, device="cpu", num_threads=1)
try:
    next(iter(loader))
finally:
    go_on.set()
"""
    process = begin(script)
    interrupt_when_ready(process)
    code, out, err = finish(process)
    assert code == -signal.SIGINT
    assert set(out.split()) <= {"ready"}  # a queued batch may still have been begun
    check_traceback(err, "KeyboardInterrupt")


# Storage that keeps each read waiting until `answers` is set: a call in C that has given up the GIL, for all the rest.
HANGS = """
import contextlib, time, warnings
from shardio.kernels import rowread
warnings.simplefilter("always")
answers, begun, open_still, real = threading.Event(), [], [], rowread.read_rows
def hang(descriptor, *arguments):
    begun.append(descriptor)
    os.write(1, b"ready\\n")
    answers.wait()
    open_still.append(os.readlink(f"/proc/self/fd/{descriptor}").endswith(".npy"))
    return real(descriptor, *arguments)
rowread.read_rows = hang
loader = ShardLoader(path, 4, device="cpu", io="pread", num_threads=2)
"""


def test_ctrl_c_while_storage_hangs_ends_it_and_names_the_file(begin: Start) -> None:
    process = begin(HANGS + "with loader:\n    next(iter(loader))")
    interrupt_when_ready(process)
    start = time.monotonic()
    code, _, err = finish(process)
    assert (code, time.monotonic() - start < 10) == (-signal.SIGINT, True)
    assert re.search(r"RuntimeWarning: \S*: no answer from the storage \(train-0\d+\.npy", err), err
    assert err.endswith("KeyboardInterrupt\n"), err


@pytest.mark.parametrize("when", ["after close", "at exit"])
def test_storage_that_answers_late_finds_its_files_open_and_is_not_read_again(when: str, begin: Start) -> None:
    script = (
        HANGS
        + """
def consume():
    with contextlib.suppress(RuntimeError):  # it was closed
        next(iter(loader))
threading.Thread(target=consume, daemon=True).start()
while not begun:
    time.sleep(0.01)
begun_before = list(begun)
loader.close()
others = [open(os.devnull) for _ in range(100)]
def answer():
    answers.set()
    while len(open_still) < len(begun):
        time.sleep(0.01)
    time.sleep(0.1)
    print(begun == begun_before, all(open_still), flush=True)
"""
    )
    script += "answer()" if when == "after close" else "import atexit\natexit.register(answer)"
    code, out, err = finish(begin(script))
    assert (code, out.splitlines()[-1]) == (0, "True True"), err
    assert len(err.splitlines()) == 2, err  # the warning


TERMINATED = """
import signal
def stop(number, frame):
    global left
    left -= 1
    if left >= 0:
        raise SystemExit(143)  # the code that job launchers use
signal.signal(signal.SIGALRM, stop)
left = {signals}
loader = ShardLoader(path, 4, device="cpu", num_threads=3, prefetch=4)
for _ in loader:
    break
signal.setitimer(signal.ITIMER_REAL, {delay}, {interval})
while True:
    for _ in loader:
        pass
"""


def test_a_signal_handler_that_exits_ends_the_script_with_its_code_and_without_a_word(begin: Start) -> None:
    # Each delay has a process of its own, forked before there is anything of shardio but its modules. It ends as usual.
    prologue = (
        PROLOGUE
        + """
for delay in (0.0001, 0.003, 0.0111, 0.0503):
    if not os.fork():
        break
    print(delay, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
"""
    )
    script = WATCHDOG + TERMINATED.format(signals=1, delay="delay", interval=0)
    assert finish(begin(script, prologue)) == (0, "0.0001 143\n0.003 143\n0.0111 143\n0.0503 143\n", "")


def test_a_storm_of_signal_handlers_that_exit_does_not_keep_the_interpreter(begin: Start) -> None:
    # When Python has given its handlers up, a signal would end the process as it ends any other.
    prologue = "import atexit, signal\natexit.register(signal.setitimer, signal.ITIMER_REAL, 0)\n" + WATCHDOG + PROLOGUE
    code, out, err = finish(begin(TERMINATED.format(signals=30, delay=0.01, interval=0.002), prologue))
    assert (code, out) == (143, "")
    assert "cannot join" not in err, err
    assert "Timeout" not in err, err


def test_a_forked_child_ends_as_usual_and_its_parent_too(begin: Start) -> None:
    script = """
import warnings
loader = ShardLoader(path, 4, device="cpu", num_threads=2)
iterator = iter(loader)
next(iterator)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it warns of a fork with threads, which is tried here
    child = os.fork()
if not child:
    try:
        next(iterator)
    except RuntimeError as error:
        print(error, flush=True)
    loader.close()
    with ShardLoader(path, 4, device="cpu") as own:
        print(sum(1 for batch in own), flush=True)
    sys.exit(7)  # the usual way out, with all that runs at exit
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(code, sum(1 for batch in iterator))
"""
    # The watchdog is left out: its thread is not there in the child, which would wait for it at exit.
    assert finish(begin(script, PROLOGUE)) == (
        0,
        "this ShardLoader was made before fork(): make it in the process that uses it\n250\n7 249\n",
        "",
    )


def test_importing_shardio_imports_nothing_else_and_training_no_decoders(begin: Start) -> None:
    # torch itself imports tqdm where it is installed: only modules count that shardio adds to those of numpy and torch.
    script = """
def packages(modules):
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)

from shardio import ShardDataset, open_shards
for images, labels in ShardLoader(path, 4, device="cpu"):
    pass
ShardDataset(path)[0], open_shards(path)[0]
new = set(sys.modules) - _torch
print(*packages(_shardio - _alone))
print(*packages(new))
print(*{name.split(".")[1] for name in new if name.startswith("shardio.")})
"""
    code, out, err = finish(begin(script, PROLOGUE))
    assert (code, err) == (0, "")
    at_first, packages, rooms = out.splitlines()
    assert at_first == "shardio"
    assert set(packages.split()) <= {"numpy", "shardio", "torch", "zlib_ng"}  # the last for check="sample"
    assert "loading" in rooms.split()
    assert not set(rooms.split()) & {"changes", "cli", "conversion", "measure", "viewing"}
