"""Interpreters that run a script to their real end, forked from one that has imported torch and waits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

# Each line of the socket is a script and its words, and brings the ends of two pipes. A child leaves the loop, and runs
# its script where this one ends: at the top level of `__main__`, whose end is that of the interpreter. Scripts find
# which modules were there before and after each import.
_SERVER = """\
import json, os, socket, sys
_alone = set(sys.modules)
import shardio
_shardio = set(sys.modules)
import numpy.random, torch, torch.utils.data
_torch = set(sys.modules)
import shardio.loading.loader
_socket = socket.socket(fileno=int(sys.argv[1]))
while True:
    _request, _pipes, _, _ = socket.recv_fds(_socket, 1 << 20, 2)
    if not _request:
        os._exit(0)
    if not (_child := os.fork()):
        break
    _socket.sendall(b"%d " % _child)
    for _pipe in _pipes:
        os.close(_pipe)
    _socket.sendall(b"%d " % os.waitstatus_to_exitcode(os.waitpid(_child, 0)[1]))
_socket.close()
os.setsid()
for _number, _pipe in enumerate(_pipes, start=1):
    os.dup2(_pipe, _number)
    os.close(_pipe)
_script, *sys.argv[1:] = json.loads(_request)
exec(compile(_script, "<string>", "exec"))
"""


class Interpreter:
    """A running script. Has the methods of subprocess.Popen that tests use."""

    def __init__(self, server: socket.socket, script: str, *words: str) -> None:
        self._server = server
        self.returncode: int | None = None
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        socket.send_fds(server, [json.dumps([script, *words]).encode()], [out_end, err_end])
        os.close(out_end)
        os.close(err_end)
        self.stdout, self._stderr = os.fdopen(out), os.fdopen(err)
        self.pid = self._number()

    def _number(self) -> int:
        digits = b""
        while not digits.endswith(b" "):
            digits += self._server.recv(1) or b"closed "
        return int(digits)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what the script still prints until its end. It must print less than a pipe takes."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            self.returncode = self._number()
        with self.stdout, self._stderr:
            return self.stdout.read(), self._stderr.read()


@contextlib.contextmanager
def serving() -> Iterator[socket.socket]:
    """Yields the socket for `Interpreter`."""
    here, there = socket.socketpair()
    with here:
        with there:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-X", "faulthandler", "-c", _SERVER, str(there.fileno())],
                pass_fds=[there.fileno()],
                # A launcher's variables would change the order; PYTHONWARNINGS would change which warnings are errors.
                env={name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"},
            )
        yield here
        here.shutdown(socket.SHUT_RDWR)
        process.wait(60)


def end(interpreter: Interpreter | subprocess.Popen[str]) -> None:
    """Kills the script, if it has not ended, and processes that it may have forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(interpreter.pid, signal.SIGKILL)
    if interpreter.returncode is None:
        interpreter.communicate()
