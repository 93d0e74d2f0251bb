"""Commands in this process, and in processes forked from one that has imported the slow modules and waits."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

from click.testing import CliRunner, Result
from places import CHAOS, ROOT

# A benchmark sees no GPU, even if there is one: so there is one answer to each question.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def shardio(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, as a process of its own would, with stdout and stderr that are no terminals."""
    from shardio.cli import main
    from shardio.measure import limits

    command = ["shardio", *map(str, words)]
    outputs = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2)]
    with (
        contextlib.redirect_stdout(outputs[0]),
        contextlib.redirect_stderr(outputs[1]),
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ),
        mock.patch.object(limits, "BLOCK_NBYTES", 1 << 20),  # the first touch of the usual block takes seconds
        contextlib.ExitStack() as stack,
    ):
        if cwd:
            stack.callback(os.chdir, os.getcwd())
            os.chdir(cwd)
        code = main._run()
    said = [output.buffer.getvalue().decode("utf-8", "surrogateescape") for output in outputs]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(command, code, *said)


def assert_one_clear_error(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert result.returncode == code
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 4  # click's usage line, its hint, an empty line, the error
    for part in parts:
        assert part in result.stderr


def call(*words: object) -> Result:
    """Runs a command in this process."""
    from shardio.cli.main import cli

    return CliRunner().invoke(cli, list(map(str, words)))


def called(*words: object) -> str:
    """Runs a command in this process, which must succeed, and returns what it printed."""
    result = call(*words)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def run_python(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Python with the package and tools/chaos/ on its path, warnings being errors.

    torch has one thread: where other tests run beside this one, several would wait for each other, and not by sleeping.
    """
    path = os.pathsep.join([str(ROOT), str(CHAOS), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    return run_forked(*map(str, words), env=environ, timeout=300)


def printed_by(*words: object, **environ: str) -> str:
    """Runs `run_python`, which must succeed, and returns what it printed."""
    result = run_python(*words, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_notices(attack: str, careless: str, told: str, folder: Path) -> None:
    """An attack on a package that is careless must say `told`."""
    script = f"""
import shutil, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import change_sets, off_path
from shardio.changes import carry, draft, merge
from shardio.kernels import resample as kernel
from shardio.loading import transform
from shardio.reading import mixed, shardset
real, take, rename = carry.write_order, draft.StoredRows.take, carry.rename_new
halve, plan = kernel.to_yuv420, merge._plan
{careless}
def say(text):
    print(text)
    if {told!r} in text:
        sys.exit()
{attack}
"""
    assert told in printed_by("-c", script, folder)


_PROCESSES = multiprocessing.get_context("forkserver")
# The first optimizer imports torch's compiler, which takes seconds.
PRELOADED = ["torch._dynamo", "shardio.cli.main", "shardio.conversion.convert", "shardio.loading.loader"]


def run_forked(
    *words: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    umask: int = -1,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """`python -W error WORDS`, where "shardio" stands for "-m shardio".

    Does what subprocess.run does with captured output, except that the interpreter's end is cut short.
    """
    command = list(map(str, words))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        arguments = (command, outputs, cwd or os.getcwd(), dict(os.environ if env is None else env), umask)
        process = _PROCESSES.Process(target=_run, args=arguments)
        process.start()
        try:
            process.join(timeout)
            if process.exitcode is None:
                process.kill()
                process.join()
                raise subprocess.TimeoutExpired(command, timeout)
            said = [path.read_text(errors="surrogateescape") for path in outputs]
            return subprocess.CompletedProcess(command, process.exitcode, *said)
        finally:
            process.close()


def _run(command: list[str], outputs: list[Path], cwd: str | Path, env: dict[str, str], umask: int) -> None:
    for number, path in enumerate(outputs, start=1):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if umask >= 0:
        os.umask(umask)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "PYTHONIOENCODING" in env:  # "utf-8:strict"; stderr shows what it cannot encode, whatever is said
        encoding, _, errors = env["PYTHONIOENCODING"].partition(":")
        sys.stdout.reconfigure(encoding=encoding, errors=errors)  # type: ignore[union-attr]
    if "OMP_NUM_THREADS" in env:  # torch has already looked for it
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    warnings.simplefilter("error")
    sys.warnoptions[:] = ["error"]  # for the processes that this one starts
    sys.argv = command
    if command[0] == "shardio":
        from shardio.cli.main import main

        main()
    elif command[0] == "-c":
        sys.argv = [command[0], *command[2:]]
        sys.path.insert(0, "")
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")
