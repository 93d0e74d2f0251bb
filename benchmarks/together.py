"""`stage --together` on nodes with limited links, and one `stage` on each node, from a source that is limited in all;
and the first epoch of loaders that copy together.

    sudo python benchmarks/together.py [--nodes 8] [--source 40] [--link 125] [--rounds 5] [--epochs 0]
    python benchmarks/together.py --predict

Each node is a network namespace with a link of its own (`tc`), joined by a bridge; the source is a web server in
another one. Rates are in MB/s. Needs root. The server counts the bytes of files that it has sent. Memory and processor
time are of a node. With --predict, it prints what to expect of up to 1,024 nodes, by a model of windows, reads and the
ring.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import os
import shutil
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common import BUILD, describe_machine, generated_set, spread

from shardio.cache.together import AHEAD, MOST_NBYTES
from shardio.format.manifest_file import load_manifest

CACHES = BUILD / "together"
SOURCE, PORT = "10.77.255.1", 8123


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files, and at /sent how many bytes of them it has sent. `port` is on all addresses."""

    protocol_version = "HTTP/1.1"
    sent = 0
    begun = 0.0
    """When the first long request came since the last /sent."""

    def do_GET(self) -> None:
        if self.path == "/sent":
            body = f"{Server.sent} {Server.begun}".encode()
            Server.begun = 0.0
            self._head(200, len(body))
            self.wfile.write(body)
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        first, last = 0, path.stat().st_size - 1
        wanted = self.headers.get("Range")
        if wanted is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        self._head(200 if wanted is None else 206, last + 1 - first, f"bytes {first}-{last}/{path.stat().st_size}")
        if last - first >= 1 << 16:
            Server.begun = Server.begun or time.monotonic()
        with open(path, "rb") as file:
            while first <= last:
                done = os.sendfile(self.wfile.fileno(), file.fileno(), first, last + 1 - first)
                first, Server.sent = first + done, Server.sent + done

    def _head(self, status: int, nbytes: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def run(*words: object) -> None:
    subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)


def limited(*words: object, rate: float) -> None:
    """Limits what an interface sends, to `rate` MB/s."""
    run(*words, "root", "tbf", "rate", f"{rate * 8:.0f}mbit", "burst", "256kb", "latency", "200ms")


@contextlib.contextmanager
def network(nodes: int, source: float, link: float) -> Iterator[None]:
    """Makes a bridge, a namespace for the source and one for each node."""
    names = ["shardio-src", *(f"shardio-n{number}" for number in range(nodes))]
    try:
        run("ip", "link", "add", "shardio0", "type", "bridge")
        run("ip", "link", "set", "shardio0", "up")
        for number, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"shv{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"shv{number}", "mtu", 9000, "master", "shardio0", "up")
            address = SOURCE if not number else f"10.77.0.{number}"
            run(*inside, "ip", "address", "add", f"{address}/16", "dev", "eth0")
            for device in ("eth0", "lo"):
                run(*inside, "ip", "link", "set", device, "mtu", 9000, "up")
            limited(*inside, "tc", "qdisc", "add", "dev", "eth0", rate=link if number else source)
            if number:
                limited("tc", "qdisc", "add", "dev", f"shv{number}", rate=link)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", "shardio0"], stderr=subprocess.DEVNULL, check=False)


def sent() -> tuple[int, float]:
    """Returns how many bytes of files the source has sent, and when it began since the last call."""
    code = f"import urllib.request as u; print(u.urlopen('http://{SOURCE}:{PORT}/sent').read().decode())"
    words = ["ip", "netns", "exec", "shardio-src", sys.executable, "-c", code]
    deadline = time.monotonic() + 30
    while True:
        answer = subprocess.run(words, check=False, capture_output=True, text=True)
        if not answer.returncode:
            nbytes, begun = answer.stdout.split()
            return int(nbytes), float(begun)
        if time.monotonic() > deadline:
            raise SystemExit(answer.stderr)
        time.sleep(0.2)


def train(url: str, cache: str) -> None:
    """Reads an epoch of a loader of this rank, while the nodes copy together. Prints the seconds that it takes."""
    import torch.distributed as distributed

    from shardio.loading.loader import ShardLoader

    distributed.init_process_group("gloo")
    with ShardLoader(url, 64, device="cpu", cache=cache, together=True) as loader:
        start = time.monotonic()
        for _ in loader:
            pass
        print(time.monotonic() - start, flush=True)
        distributed.barrier()  # a loader that closes takes no further part


def copy(nodes: int, how: str, name: str) -> tuple[float, float, int, float, float]:
    """Returns the seconds until all nodes have the copy, from their start and from the first request of a piece, the
    bytes sent, the most memory of a node in MB, and the mean processor time of a node in seconds. Of an epoch, the
    second figure is how long the slowest loader takes for it."""
    shutil.rmtree(CACHES, ignore_errors=True)
    CACHES.mkdir(parents=True)
    (before, _), start = sent(), time.monotonic()
    processes = []
    for rank in range(nodes):
        words = ["ip", "netns", "exec", f"shardio-n{rank}", sys.executable]
        words += [__file__, "--train"] if how == "epoch" else ["-m", "shardio", "stage"]
        words += [f"http://{SOURCE}:{PORT}/{name}", str(CACHES / str(rank))]
        words += ["--together"] if how == "together" else []
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(nodes), "GLOO_SOCKET_IFNAME": "eth0"}
        environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True))
    memory, cpu, epoch = 0.0, 0.0, 0.0
    for process in processes:
        assert process.stdout is not None
        said = process.stdout.read()
        epoch = max(epoch, float(said) if how == "epoch" and said else 0.0)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"a node ended with {process.returncode}")
        memory, cpu = max(memory, usage.ru_maxrss / 1e3), cpu + (usage.ru_utime + usage.ru_stime) / nodes
    end, (after, begun) = time.monotonic(), sent()
    return end - start, epoch or end - begun, after - before, memory, cpu


def predict(nodes: int, nbytes: float, source: float, link: float, latency: float) -> tuple[float, float]:
    """Returns the seconds of a copy, and the bytes that pass over each link in each direction, as shares of the set.

    Reading: all shares of a window come at the source's rate, AHEAD windows at a time. Gathering: each node sends a
    share to its neighbor in nodes - 1 steps, after which all have the window.
    """
    windows = max(1, round(nbytes / MOST_NBYTES))
    window = nbytes / windows
    step = latency + window / nodes / link
    read = [0.0] * (windows + AHEAD)
    gathered = [0.0] * (windows + 1)
    for number in range(windows):
        begin = max(read[number - 1] if number else 0.0, gathered[number - AHEAD] if number >= AHEAD else 0.0)
        read[number] = begin + max(window / source, window / nodes / link)
        gathered[number] = max(read[number], gathered[number - 1] if number else 0.0) + (nodes - 1) * step
    return gathered[windows - 1], (nodes - 1) / nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--source", type=float, default=40.0, help="MB/s in all; default %(default)s")
    parser.add_argument("--link", type=float, default=125.0, help="MB/s of each node, each way; default %(default)s")
    parser.add_argument("--samples", type=int, default=5_400, help="of 196,608 bytes; default %(default)s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--alone", type=int, default=1, help="rounds of one `stage` on each node; default %(default)s")
    parser.add_argument("--epochs", type=int, default=0, help="rounds of an epoch together; default %(default)s")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    if options.serve:
        os.chdir(options.serve)
        with socketserver.ThreadingTCPServer(("", PORT), Server) as server:
            server.daemon_threads = True
            server.serve_forever()
    if options.predict:
        print("250 GB, a source of 10 GB/s in all, links of 12.5 GB/s (100 Gbit/s), 50 us a step")
        print(
            f"{'nodes':>6}{'seconds':>10}{'to set / source':>18}{'over a link, of the set':>26}{'alone, seconds':>16}"
        )
        for nodes in (2, 4, 8, 16, 64, 256, 1024):
            seconds, share = predict(nodes, 250e9, 10e9, 12.5e9, 50e-6)
            print(f"{nodes:>6}{seconds:>10.0f}{seconds / 25:>18.2f}{share:>26.3f}{nodes * 25:>16,}")
        return
    print(describe_machine())
    path = generated_set(options.samples, 256, 64 << 20)
    nbytes = load_manifest(path).nbytes
    least = nbytes / options.source / 1e6
    with network(options.nodes, options.source, options.link):
        words = ["ip", "netns", "exec", "shardio-src", sys.executable, __file__, "--serve", str(path.parent)]
        server = subprocess.Popen(words)
        try:
            rounds = {"together": options.rounds, "alone": options.alone, "epoch": options.epochs}
            found = {how: [copy(options.nodes, how, path.name) for _ in range(rounds[how])] for how in rounds}
        finally:
            server.kill()
            server.wait()
    shutil.rmtree(CACHES)
    print(f"{options.nodes} nodes, {nbytes / 1e9:.2f} GB, source {options.source:g} MB/s, links {options.link:g} MB/s")
    heads = ("seconds", "copying", "to set / source rate", "sent / set", "MB", "CPU s")
    print(f"{'':<10}" + "".join(f"{head:>26}" for head in heads))
    for name, results in found.items():
        if results:
            seconds, copying, nbytes_sent, memory, cpu = zip(*results, strict=True)
            cells = [spread(seconds, 1), spread(copying, 1), spread([one / least for one in copying], 2)]
            cells += [spread([one / nbytes for one in nbytes_sent], 4), spread(memory, 0), spread(cpu, 1)]
            print(f"{name:<10}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
