"""Nodes that copy together: one read of the source, the bytes of `stage`, and whoever breaks stops no other."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import printed_by, run_python, shardio
from deadlines import until
from folders import contents, flip
from hooks import call_before
from places import CHAOS
from torch.distributed import HashStore, TCPStore

from shardio.cache import stage as staging
from shardio.cache.folder import Cache
from shardio.cache.meeting import Group, GroupBrokenError, Meeting, _store
from shardio.cache.partial_copy import COMING, MISSING, THERE, PartialCopy, blocks_of
from shardio.cache.stage import stage
from shardio.cache.together import Together, WindowPlan, add_lost, joined, plan_window
from shardio.errors import LaunchError
from shardio.format.entries import FileEntry
from shardio.format.manifest_file import load_manifest
from shardio.loading.world import rendezvous_of
from shardio.reading.shardset import open_shards
from shardio.sets.storage import FolderStorage
from shardio.system.opening import FolderHandle

FILES = [FileEntry(name, 1000, "0" * 64) for name in "ab"]


@pytest.fixture(scope="module", autouse=True)
def pipe_of_torch() -> None:
    """The first store of a process opens a pipe, which stays."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [1, 300, 1 << 20])
def test_blocks_cover_every_file_once_and_are_found_by_their_bytes(
    make_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr("shardio.cache.partial_copy._LEAST_NBYTES", least)
    monkeypatch.setattr("shardio.cache.partial_copy._PLAIN_NBYTES", 512)
    number = 0
    for entry, blocks in blocks_of(load_manifest(make_set(45))).items():
        assert blocks.first == number
        number += blocks.count
        starts = [blocks.start(block) for block in range(blocks.count + 1)]
        assert (starts[0], starts[-1], starts) == (0, entry.nbytes, sorted(starts))
        for start in range(0, entry.nbytes, 97):
            for stop in {start + 1, min(start + 700, entry.nbytes), entry.nbytes}:
                first, last = blocks.around(start, stop)
                assert starts[first] <= start < starts[min(first + 1, blocks.count)] or first == blocks.count - 1
                assert starts[last - 1] < stop <= starts[last] or stop > starts[-2]
                inside = [k for k in range(blocks.count) if start <= starts[k] and starts[k + 1] <= stop]
                first, last = blocks.within(start, stop)
                assert list(range(first, last)) == inside


def test_what_a_killed_process_was_fetching_is_missing_and_what_it_had_written_is_there(
    make_set: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.cache.partial_copy._LEAST_NBYTES", 1)
    out = make_set(45)
    manifest = load_manifest(out)
    entry = manifest.splits["train"].shards[0]
    with FolderHandle(tmp_path) as folder:
        copy = PartialCopy.begin(folder, manifest, manifest.files)
        data = (out / entry.file).read_bytes()
        stop = copy.blocks[entry].start(3)
        copy.write(entry, 0, memoryview(data)[:stop])
        copy.mark(entry, 2, stop, entry.nbytes)
        other = PartialCopy.find(tmp_path, manifest)
        assert other is not None
        assert other.states_of(entry, 0, entry.nbytes).tolist()[:4] == [THERE] * 3 + [2]
        again = PartialCopy.begin(folder, manifest, manifest.files)
        assert again.states_of(entry, 0, entry.nbytes).tolist()[:4] == [THERE] * 3 + [MISSING]
        assert [run[2] for run in again.runs(entry, 5, entry.nbytes - 5)] == [THERE, MISSING]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans_give_each_missing_byte_one_reader_and_equal_shares() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        nodes, sizes = rng.randint(2, 9), [rng.randint(1, 90) for _ in range(rng.randint(1, 30))]
        blocks, start = [], 0
        for size in sizes:
            blocks.append((FILES[len(blocks) % 2], start, start + size))
            start += size
        chance = rng.choice([0, 0.2, 0.9])
        has = np.array([[rng.random() < chance for _ in blocks] for _ in range(nodes)])
        readers = sorted(rng.sample(range(nodes), rng.randint(1, nodes)))
        plan = plan_window(blocks, has, readers)
        wanted = [block for number, block in enumerate(blocks) if not has[:, number].all()]
        total = sum(stop - start for _, start, stop in wanted)
        assert sum(piece.nbytes for piece in plan.pieces) == total, seed
        assert plan.share_nbytes == -(-total // nodes), seed
        shares = [sum(p.nbytes for p in plan.pieces if p.share == node) for node in range(nodes)]
        assert shares == [max(0, min(plan.share_nbytes, total - node * plan.share_nbytes)) for node in range(nodes)]
        assert plan.counts(nodes).sum() == total
        found = {byte for entry, start, stop, *_ in joined(plan.pieces) for byte in range(start, stop)}
        assert found == {byte for _, start, stop in wanted for byte in range(start, stop)}, seed
        for piece in plan.pieces:
            number = next(n for n, (_, start, stop) in enumerate(blocks) if start <= piece.start < stop)
            assert piece.from_source == (not has[:, number].any()), seed
            assert piece.owner in readers if piece.from_source else has[piece.owner, number], seed


def test_in_another_turn_one_node_reads_all_and_sends_it_to_each_other_node_and_then_another_one() -> None:
    blocks, has = [(FILES[0], 0, 90), (FILES[1], 5, 9)], np.array([[True, False], [False, False], [False, True]])
    for turn, sender in ((1, 2), (2, 0), (3, 2)):
        plan = plan_window(blocks, has, [0, 2], turn)
        assert plan.sender == sender
        assert {(piece.owner, piece.share, piece.from_source) for piece in plan.pieces} == {(sender, sender, True)}
        assert [(run.start, run.stop) for run in joined(plan.pieces)] == [(0, 90), (5, 9)]


def test_only_a_node_that_stays_slow_is_left_behind() -> None:
    lost, usual = np.zeros(4), np.full(4, 0.2, np.float32)
    assert [add_lost(lost, np.array([0.1, 60, 0.1, 0.1], np.float32)), add_lost(lost, usual)] == [None, None]
    found = [add_lost(lost, np.array([0.1, 0.1, 3, 0.1], np.float32)) for _ in range(10)]
    assert found[:5] == [None] * 5
    assert 2 in found
    assert not any(add_lost(lost, np.full(4, 9, np.float32)) for _ in range(10))


# --- where nodes meet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "environ", "found"),
    [
        ("node:29", {"MASTER_ADDR": "other", "MASTER_PORT": "1"}, ("node", 29)),
        ("[::1]:29", {}, ("::1", 29)),
        (None, {"MASTER_ADDR": "head", "MASTER_PORT": "500", "SLURM_JOB_NODELIST": "a"}, ("head", 500)),
        (
            None,
            {"SLURM_STEP_NODELIST": "gpu[007-012,20],x1", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "2"},
            ("gpu007", 15095),
        ),
        (None, {"SLURM_JOB_NODELIST": "a-1,b[1-2]", "SLURM_JOB_ID": "0"}, ("a-1", 15000)),
        (None, {"SLURM_JOB_NODELIST": "rack[3-4]-ib", "SLURM_JOB_ID": "1"}, ("rack3-ib", 15031)),
        (None, {"SLURM_JOB_NODELIST": "node[1-2,5]rack[03-4],b"}, ("node1rack03", 15000)),
    ],
)
def test_the_rendezvous_is_what_the_option_the_environment_or_slurm_says(
    text: str | None, environ: dict[str, str], found: tuple[str, int]
) -> None:
    assert rendezvous_of(text, environ) == found


@pytest.mark.parametrize(
    ("text", "environ"), [(None, {}), ("node", {}), ("node:0", {}), ("node:99999", {}), (":5", {})]
)
def test_a_rendezvous_that_is_none_is_refused(text: str | None, environ: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"HOST:PORT.*--rendezvous"):
        rendezvous_of(text, environ)


def test_a_host_name_that_does_not_resolve_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cache.meeting.MEET_SECONDS", 0.5)
    monkeypatch.setattr("shardio.cache.meeting._CONNECT_SECONDS", 0.5)
    said: list[str] = []
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid.*--rendezvous"):
        Meeting.at(("no-such-host.invalid", 29), 1, 2, said.append)
    assert [text.partition(":")[0] for text in said] == ["no-such-host.invalid"]


def test_jobs_at_one_port_do_not_mix_if_they_have_other_numbers_or_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cache.meeting.MEET_SECONDS", 1.0)
    monkeypatch.setattr("shardio.cache.meeting.REGROUP_SECONDS", 0.1)
    place = ("127.0.0.1", free_port())

    def formed(rank: int, job: str, digest: str) -> list[int] | str:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        meetings.append(Meeting.at(place, rank, 3))
        try:
            return [member.rank for member in meetings[-1].form(digest, fills=True)]
        except GroupBrokenError as error:
            return str(error)

    meetings: list[Meeting] = []  # rank 0 hosts the store
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(formed, rank, "7", "ab"[rank]) for rank in range(2)]
        assert found[0].result() == [0]
        assert "another set" in found[1].result()
    assert "rank 0 does not answer" in formed(1, "8", "a")
    assert "came late" in formed(2, "7", "a")


def test_loaders_of_different_sets_all_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cache.meeting.MEET_SECONDS", 1.0)
    for digests, told in (("ab", "digest.* found b on rank 1"), ("a", "rank 1 has not come")):
        store = HashStore()

        def agree(rank: int, digest: str, store: HashStore = store) -> str:
            with pytest.raises(LaunchError) as error:
                Meeting(store, rank, 2, "127.0.0.1").agree({"digest": digest})
            return str(error.value)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(agree, range(2), digests))
        assert all(re.search(told, each) for each in found), found


@pytest.mark.parametrize(
    "said",
    [
        *("null", "5", "{[", "[" * 100000, "[3]", '"text"', b"\xff\xfe"),
        *("{}", "[]", "false", '{"a": 1}', '{"1": null}', '{"1": {}}', '{"1": {"rank": 1}}'),
        '{"1": {"rank": 1, "name": "a", "host": 5, "port": 1, "digest": "a"}}',
        '{"1": {"rank": 1, "name": "a", "host": "a", "port": 1099511627776, "digest": "a"}}',
        '{"1": {"rank": 1, "name": "a", "host": "\\ud800", "port": 1, "digest": "a"}}',
        '{"1": {"rank": 1, "name": "a", "host": "a", "port": 1, "digest": "a"}}',
    ],
)
def test_words_of_a_stranger_end_no_node(said: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.cache.meeting.REGROUP_SECONDS", 0.1)
    store = HashStore()
    for key in ("form", "agree", "form/1", "agree/1"):
        store.set(key, said)
    nodes = [Meeting(store, rank, 2, "127.0.0.1") for rank in range(2)]
    with pytest.raises(GroupBrokenError, match="rank"):
        nodes[1].form("a", fills=True)
    with pytest.raises(LaunchError, match="rank"):
        nodes[1].agree({"digest": "a"})
    for key in ("form/1", "agree/1"):
        store.set(key, said)
    assert [member.rank for member in nodes[0].form("a", fills=True)] == [0]
    with pytest.raises(LaunchError, match="rank 1"):
        nodes[0].agree({"digest": "a"})


def test_a_store_listens_at_its_own_address_alone() -> None:
    store = _store("127.0.0.1", 0, 5.0, hosts=True)
    for address, answer in (("127.0.0.1", 0), ("127.0.0.2", errno.ECONNREFUSED)):
        with socket.socket() as probe:
            assert probe.connect_ex((address, store.port)) == answer


# --- copying ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> list[str]:
    """What the nodes say."""
    return []


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Callable[..., list[Any]]:
    """Copies a set to caches together: each node is a thread. Of `size` ranks, those without a cache do not come.

    Returns the bytes that each node has read from the source, and the files that it has copied.
    """
    for name, value in (
        *(("partial_copy._LEAST_NBYTES", 1), ("partial_copy._PLAIN_NBYTES", 512)),
        *(("together._FIRST_NBYTES", 1000), ("together.MOST_NBYTES", 3000)),
        *(("meeting.SILENT_SECONDS", 10.0), ("meeting.MEET_SECONDS", 10.0), ("meeting.REGROUP_SECONDS", 2.0)),
    ):
        monkeypatch.setattr(f"shardio.cache.{name}", value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    reads: dict[int, list[int]] = {}

    class Counting(FolderStorage):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.reads = reads[threading.get_ident()] = []

        def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
            super().read_into(entry, offset, buffer)
            self.reads.append(len(buffer))

    monkeypatch.setattr(staging, "open_storage", Counting)

    def run(sources: Path | Sequence[Path], caches: Sequence[Path], size: int = 0) -> list[list[int]]:
        place = ("127.0.0.1", free_port())

        def node(rank: int) -> list[int]:
            meeting = Meeting.at(place, rank, size or len(caches))
            src = sources if isinstance(sources, Path) else sources[rank]
            report = stage(src, caches[rank], together=meeting, on_message=said.append)
            return [sum(reads[threading.get_ident()]), report.num_copied]

        with ThreadPoolExecutor(len(caches)) as pool:
            return list(pool.map(node, range(len(caches))))

    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def src(make_set: Callable[..., Path]) -> Path:
    return make_set(45)


@pytest.fixture
def caches(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"node-{number}" for number in range(3)]


def assert_copied(src: Path, caches: Sequence[Path]) -> None:
    for cache in caches:
        assert contents(cache / load_manifest(src).digest) == contents(src)


def test_nodes_read_the_source_once_and_have_the_copy_that_stage_makes(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]]
) -> None:
    manifest = load_manifest(src)
    stage(src, caches[0])  # one has everything, one a part, and one nothing
    part = Path(stage(src, caches[1]).path)
    kept = sum(path.stat().st_size for path in part.glob("train-0000[0-2].npy"))
    for name in ("manifest.json", "train-index.npy", "train-00003.npy", "train-00004.npy"):
        (part / name).unlink()
    # Not even what only one of them had.
    assert sum(nbytes for nbytes, _ in nodes(src, caches[1:])) == manifest.nbytes - kept
    assert_copied(src, caches)
    (part / "manifest.json").unlink()
    (part / "train-00003.npy").unlink()
    assert nodes(src, caches) == [[0, 0], [0, 1], [0, 0]]
    assert contents(part) == contents(src)


def test_a_damaged_copy_of_a_node_is_named_there_and_mended_and_no_other_node_has_it(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]], said: list[str]
) -> None:
    damaged = Path(stage(src, caches[0]).path) / "train-00003.npy"
    flip(damaged)
    nodes(src, caches)
    assert_copied(src, caches)
    assert [text for text in said if text.startswith(f"{damaged}: is damaged")]


def test_blocks_of_a_file_that_others_lack_are_passed_on_after_the_file_is_finished(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]]
) -> None:
    manifest, there = load_manifest(src), 0
    for number, cache in enumerate(caches):
        with Cache(cache).lease(manifest.digest) as lease, lease.open_folder() as folder:
            copy = PartialCopy.begin(folder, manifest, manifest.files)
            for entry in manifest.splits["train"].shards:
                # All but the beginning of each shard, on another node for each.
                start = copy.blocks[entry].start(2)
                if int(entry.file[-5]) % 3 == number:
                    copy.write(entry, start, memoryview((src / entry.file).read_bytes())[start:])
                    there += entry.nbytes - start
    assert sum(nbytes for nbytes, _ in nodes(src, caches)) == manifest.nbytes - there
    assert_copied(src, caches)


def test_a_node_that_fails_leaves_its_group_at_once(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def fail(together: Together, *_: object) -> None:
        if together.group.rank == 1:
            raise ValueError("on purpose")

    call_before(monkeypatch, Group, "leave", lambda group: left.append(group.rank))
    call_before(monkeypatch, Together, "_pass", fail)
    with pytest.raises(ValueError, match="on purpose"):
        nodes(src, caches[:2])
    assert left[0] == 1


def test_the_nodes_that_come_copy_without_the_one_that_does_not(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.cache.meeting.MEET_SECONDS", 2.0)
    assert sum(nbytes for nbytes, _ in nodes(src, caches[:2], size=3)) == load_manifest(src).nbytes


def test_a_block_that_a_node_is_fetching_for_a_batch_is_waited_for_and_not_read_again(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load_manifest(src)
    entry = manifest.splits["train"].shards[1]

    def fetch(together: Together) -> None:
        if together.group.rank == 0:
            start, stop = (together.partial.blocks[entry].start(block) for block in (1, 2))
            together.partial.mark(entry, COMING, start, stop)
            block = memoryview((src / entry.file).read_bytes())[start:stop]
            threading.Timer(0.5, together.partial.write, (entry, start, block)).start()

    call_before(monkeypatch, Together, "run", fetch)
    assert sum(nbytes for nbytes, _ in nodes(src, caches[:2])) < manifest.nbytes
    assert_copied(src, caches[:2])


def test_nodes_that_want_different_sets_go_on_alone(
    make_set: Callable[..., Path], caches: list[Path], nodes: Callable[..., list[Any]], said: list[str]
) -> None:
    sources = [make_set(20), make_set(30)]
    nodes(sources, caches[:2])
    for source, cache in zip(sources, caches[:2], strict=True):
        assert_copied(source, [cache])
    assert len(said) == 1
    assert re.search("another set.* goes on alone", said[0])


def test_a_file_that_came_wrong_is_read_again_once_for_all_and_the_node_that_gave_it_is_named(
    src: Path, caches: list[Path], nodes: Callable[..., list[Any]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, read = load_manifest(src), Together._read
    wrong = manifest.splits["train"].shards[1]

    def lie(together: Together, plan: WindowPlan) -> Any:
        out = read(together, plan)
        if together.group.rank == 2 and plan.sender is None and wrong in {piece.entry for piece in plan.pieces}:
            out[:] = 7
        return out

    monkeypatch.setattr(Together, "_read", lie)
    found = nodes(src, caches)
    assert_copied(src, caches)
    named = set(re.findall(r"train[\w-]*\.npy", " ".join(said)))
    assert wrong.file in named
    again = sum(entry.nbytes for entry in manifest.files if entry.file in named)
    assert sum(nbytes for nbytes, _ in found) == manifest.nbytes + again
    assert all(re.findall("rank [0-9]", text) == ["rank 2"] for text in said), said


class Gone:
    """A store whose process has ended."""

    def set(self, *_: str) -> None:
        raise RuntimeError("Broken pipe\nframe #0")


def test_a_node_goes_on_alone_if_rank_0_ends_before_they_have_agreed_and_a_loader_gets_an_error(
    src: Path, tmp_path: Path
) -> None:
    said, meeting = list[str](), Meeting(Gone(), 1, 2, "127.0.0.1")
    assert meeting._host == "127.0.0.1"  # where others reach this node: not the address of no interface
    report = stage(src, tmp_path / "cache", together=meeting, on_message=said.append)
    assert contents(Path(report.path)) == contents(src)
    assert said == ["rank 0 does not answer: Broken pipe: this node goes on alone"]
    with pytest.raises(LaunchError, match="rank 0 does not answer: Broken pipe"):
        meeting.agree({})


def test_a_store_whose_process_is_stopped_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {store.port}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_python, "-c", code, tmp_path / "host")
        until((tmp_path / "host").exists)
        pid, port = map(int, (tmp_path / "host").read_text().split())
        met = Meeting.at(("127.0.0.1", port), 1, 2)
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr("shardio.cache.meeting.MEET_SECONDS", 0.5)
        monkeypatch.setattr("shardio.cache.meeting.REGROUP_SECONDS", 0.1)
        with pytest.raises(GroupBrokenError, match="no answer"):
            met.form("", fills=True)
        os.kill(pid, signal.SIGKILL)
    for thread in threading.enumerate():  # what was waiting gets an error now
        if thread.name == "shardio-meet":
            thread.join(30)


SPACES = """
import os, socket, subprocess, sys, time
ends = [(0, "10.77.{}.1"), (subprocess.Popen(["unshare", "-n", "sleep", "60"]).pid, "10.77.{}.2")]
while os.readlink(f"/proc/{ends[1][0]}/ns/net") == os.readlink("/proc/self/ns/net"):
    time.sleep(0.01)

def run(pid, *words, start=subprocess.check_output, **options):
    return start([*(["nsenter", "-t", str(pid), "-n"] if pid else []), *map(str, words)], text=True, **options)

for k in (1, 2):
    run(0, "ip", "link", "add", f"veth{k}", "type", "veth", "peer", "name", f"veth{k}", "netns", ends[1][0])
    for pid, address in ends:
        run(pid, "ip", "addr", "add", address.format(k) + "/24", "dev", f"veth{k}")
        for device in ("lo", f"veth{k}"):
            run(pid, "ip", "link", "set", device, "up")
nodes = []
for rank, (pid, _) in enumerate(ends):
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
    words = (sys.executable, "-m", "shardio", "stage", sys.argv[1], sys.argv[2 + rank], "--together")
    nodes.append(run(pid, *words, "--rendezvous", "10.77.1.1:29500", start=subprocess.Popen, env=environ))
places = set()
while any(node.poll() is None for node in nodes):
    time.sleep(0.02)
    for rank, (pid, _) in enumerate(ends):
        for line in run(pid, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines():
            if line.split()[3] == "0A":
                places.add((rank, socket.inet_ntoa(bytes.fromhex(line.split()[1][:8])[::-1])))
print(sorted(places), [node.wait() for node in nodes])
run(0, "kill", ends[1][0])
"""


def test_nothing_listens_at_a_second_interface(make_set: Callable[..., Path], caches: list[Path]) -> None:
    src = make_set(95)
    tried = subprocess.run(["sh", "-c", "unshare -Urn ip link add type veth"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces: {tried.stderr.strip()}")
    words = ["unshare", "-Urn", sys.executable, "-c", SPACES, src, *caches[:2]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("[(0, '10.77.1.1'), (1, '10.77.1.2')] [0, 0]\n"), done
    assert_copied(src, caches[:2])
    assert "alone" not in done.stderr


def test_a_node_that_breaks_stops_no_other_and_the_next_run_completes_the_copies(tmp_path: Path) -> None:
    words = ("--rounds", "8", "--nodes", "3", "--seed", "1", "--folder", tmp_path)
    assert printed_by(CHAOS / "break_nodes.py", *words).endswith("\n8 rounds, 0 violations\n")
    assert not list(tmp_path.iterdir())


# --- docs/cluster.md from end to end ---------------------------------------------------------------------------------

JOB = """
import hashlib, json, sys, time
import torch.distributed as dist
from shardio import ShardLoader
src, cache = sys.argv[1:]
dist.init_process_group("gloo")  # two nodes of two ranks each
with ShardLoader(src, 8, device="cpu", cache=cache, together=True, return_indices=True) as loader:
    for _ in range(2):
        for images, labels, indices in loader:
            for image, label, index in zip(images, labels.tolist(), indices.tolist()):
                print(json.dumps([index, label, hashlib.sha256(image.permute(1, 2, 0).numpy().tobytes()).hexdigest()]))
    while loader.stats()["staging"]["state"] != "complete":
        time.sleep(0.01)
dist.destroy_process_group()
"""


def test_two_nodes_publish_list_stage_train_and_evict_as_the_page_shows(
    make_set: Callable[..., Path], tmp_path: Path, caches: list[Path]
) -> None:
    out, root = make_set(96), tmp_path / "shared"
    root.mkdir()
    published, digest = root / "imagenet-256", load_manifest(out).digest
    assert shardio("publish", out, published).returncode == 0
    assert digest[:12] in shardio("list", root).stdout
    assert shardio("stage", published, caches[0]).stdout == f"{caches[0] / digest}\n"
    lines = []
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    environ["GLOO_SOCKET_IFNAME"] = "lo"

    def job(rank: int) -> subprocess.CompletedProcess[str]:
        return run_python("-c", JOB, published, caches[rank // 2], RANK=str(rank), **environ)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(job, range(4)))
    for result in results:
        assert result.returncode == 0, result.stderr
        lines += map(json.loads, result.stdout.splitlines())
    shards = open_shards(published)
    expected = [[i, int(shards[i].label), hashlib.sha256(shards[i].image.tobytes()).hexdigest()] for i in range(96)]
    assert sorted(lines) == sorted(2 * expected)
    assert_copied(published, caches[:2])
    for cache in caches[:2]:
        assert "yes" in shardio("list", root, "--cache", cache).stdout
        assert shardio("evict", cache, "--keep", "0").returncode == 0
        assert not (cache / digest).exists()
    assert contents(published) == contents(out)
