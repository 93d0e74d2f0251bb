"""Commands in processes of their own, forked from one that has imported the slow modules and waits."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "shardio.cli.main", "shardio.conversion.convert", "shardio.loading.loader"]


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
