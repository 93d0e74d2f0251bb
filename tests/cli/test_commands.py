"""The command line as a person or a script meets it: output, exit codes, one-line errors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import numpy as np
import pytest
from command import assert_one_clear_error, shardio
from deadlines import until
from disks import raising
from folders import flip
from pictures import random_picture, write_jpeg
from places import ROOT

from shardio.cli import main
from shardio.cli.output import next_step
from shardio.conversion.convert import convert
from shardio.conversion.options import Progress
from shardio.conversion.writing.set_writer import ShardWriter
from shardio.system.opening import OpenFile
from shardio.system.progress import Bar


@pytest.fixture
def converted(image_tree: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    result = shardio("convert", image_tree, out, "--size", "16x24")
    assert result.returncode == 0, result.stderr
    return out


def test_convert_sums_up_what_it_did_and_the_second_call_finds_nothing_to_do(image_tree: Path, tmp_path: Path) -> None:
    (image_tree / "train" / "n01" / "broken.JPEG").touch()
    (image_tree / "train" / "n01" / ".hidden").touch()
    words = ("convert", image_tree, tmp_path / "out", "--size", "16", "--max-bad", "1")
    result = shardio(*words)
    assert result.returncode == 0
    # What was understood, before any work, and no bar where there is no terminal.
    assert result.stderr.splitlines() == [
        "shardio: 3 classes, n01 to n03, from the names of folders",
        "shardio: train: 13 images, 4 (n02) to 5 (n01) of a class",
        "shardio: val: 6 images, 2 of each class",
        "shardio: ignored 1: hidden: train/n01/.hidden",
    ]
    for part in (
        "  source  tree\n  found   3 classes, n01 to n03, from the names of folders\n",
        *("train: 12 images", "val: 6 images", "2 shards", "refused 1: empty 1", "ignored 1: hidden: "),
    ):
        assert part in result.stdout
    assert "nothing to do: the set is published" in shardio(*words).stdout
    first, again = (json.loads(shardio(*words[:2], tmp_path / "json", *words[3:], "--json").stdout) for _ in range(2))
    assert (first["source"], first["num_samples"]) == ("tree", {"train": 12, "val": 6})
    assert (first["num_sources"], first["ignored"]["hidden"], first["refused"]) == (19, 1, {"empty": 1})
    assert first["notes"][1:] == [
        "train: 12 images, 4 of each class",
        "val: 6 images, 2 of each class",
        "ignored 1: hidden: train/n01/.hidden",
    ]
    assert (again["num_converted"], again["digest"]) == (0, first["digest"])


@pytest.mark.parametrize("words", ["report", "view", "replay --batch-size 4", "replay --batch-size 4 --save"])
def test_an_output_may_be_a_fifo_and_not_the_own_output(
    make_set: Callable[..., Path], tmp_path: Path, words: str
) -> None:
    command, *options = words.split()
    command_line = [command, make_set(20), *options, *([] if "--save" in options else ["-o"])]
    os.mkfifo(tmp_path / "fifo")
    with OpenFile(os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # all of it has room before it is read
        result = shardio(*command_line, tmp_path / "fifo")
        assert result.returncode == 0, result.stderr
        assert reader.read(1 << 20)
    assert_one_clear_error(shardio(*command_line, "/dev/stdout"), 2, "/dev/stdout", "own stdout")


def test_plan_says_what_convert_would_do_and_exits_with_1_if_it_would_fail(image_tree: Path, tmp_path: Path) -> None:
    (image_tree / "train" / "n01" / "broken.JPEG").touch()
    (image_tree / "train" / "n01" / ".hidden").touch()
    words = ("plan", image_tree, tmp_path / "out", "--size", "16", "--seconds", "30")
    for limit, code, verdict in (("1%", 1, "TOO MANY, --max-bad 1% allows 0"), ("1", 0, "--max-bad 1 allows 1")):
        result = shardio(*words, "--max-bad", limit)
        assert (result.returncode, result.stderr) == (code, "")
        for part in (
            f"{image_tree}: tree, 19 images\n  found   3 classes, n01 to n03",
            "ignored 1: hidden: train/n01/.hidden\n",
            "in 2 shards",
            f" at {tmp_path / 'out'}: enough",
            f"bad     1 of 19 tried were refused, which are all: {verdict}\n",
        ):
            assert part in result.stdout
    facts = json.loads(shardio(*words, "--json").stdout)
    assert (facts["splits"]["train"], facts["num_classes"], facts["num_sources"], facts["fits"]) == (13, 3, 19, True)
    assert (facts["max_bad"], facts["most_bad"], facts["expected_bad"]) == (0.01, 0, 1)
    free = os.statvfs(tmp_path)
    if free.f_bavail * free.f_frsize < 19 * 65536**2 * 3:  # 245 GB
        result = shardio(*words[:4], "65536", "--seconds", "0.01", "--max-bad", "1")
        assert result.returncode == 1
        assert f"{tmp_path / 'out'}: TOO LITTLE" in result.stdout
    assert not (tmp_path / "out").exists()


def test_the_next_step_after_damage_is_one_that_works(converted: Path, tmp_path: Path) -> None:
    shardio("change", converted, tmp_path / "changed", "--drop", "--split", "val")
    with ShardWriter(tmp_path / "written", (4, 4, 3)) as writer:
        writer.append(np.zeros((4, 4, 3), np.uint8), 0)
    for out, expected in (
        (converted, f"next: shardio repair {converted} SRC"),
        (tmp_path / "changed", f"next: shardio info -v {tmp_path / 'changed'}"),
        (tmp_path / "written", f"next: shardio info -v {tmp_path / 'written'}"),
    ):
        (out / "train-index.npy").unlink()
        (out / "train-index.npy").write_bytes(b"damaged")
        result = shardio("verify", out, "--quick")
        assert (result.returncode, result.stdout.splitlines()[-1]) == (1, expected)
        if "repair" not in expected:
            assert shardio(*shlex.split(expected)[2:]).returncode == 0
    (converted / "manifest.json").write_bytes(b"{}")
    assert "next: " not in shardio("verify", converted).stdout


def test_the_next_step_for_a_folder_like_an_option_is_one_that_works() -> None:
    assert next_step("view", Path("-o"), "--indices", "1") == "next: shardio view ./-o --indices 1"


def test_verify_names_the_damaged_sample_and_exits_with_1(converted: Path) -> None:
    assert "intact" in shardio("verify", converted).stdout
    result = shardio("verify", converted, "--subset", "50%", "--seed", "9")
    assert (result.returncode, result.stderr) == (0, "")
    assert "intact: 9 samples (seed 9), sizes, headers and indexes of 5 files" in result.stdout
    flip(converted / "train-00000.npy", 4096 + 5 * 16 * 24 * 3 + 7)
    assert shardio("verify", converted, "--quick").returncode == 0
    result = shardio("verify", converted)
    assert result.returncode == 1
    assert "damaged samples: 5 (train/" in result.stdout
    facts = json.loads(shardio("verify", converted, "--json").stdout)
    assert (facts["problems"][0]["samples"], facts["subset"]) == ([5], None)


def test_verify_of_a_pinned_set_takes_the_digest_that_info_prints(converted: Path) -> None:
    digest = json.loads(shardio("info", converted, "--json").stdout)["digest"]
    assert f"  digest  {digest}\n" in shardio("info", converted).stdout
    assert shardio("verify", converted, "--digest", digest[:12], "--quick").returncode == 0
    assert_one_clear_error(shardio("verify", converted, "--digest", "0" * 64), 1, "0" * 64, digest, "pinned set")
    assert_one_clear_error(shardio("verify", converted, "--digest", digest[:11]), 2, "the first 12 or more")


def test_bench_prints_the_limits_and_the_loader(converted: Path) -> None:
    words = ("bench", converted, "--rounds", "1", "--seconds", "0.01", "--batch-size", "4", "--io", "pread")
    text = shardio(*words, "--threads", "1")
    assert (text.returncode, text.stderr) == (0, "")
    for name in ("memcpy of one large block", "np.take into slots, batch 4", "ShardLoader"):
        assert f"\n{name} " in text.stdout
    assert "ShardLoader: device cpu, batch 4, threads 1, prefetch 2, io pread\n" in text.stdout
    words = (*words, "--transform", "deit3", "--json")
    facts = json.loads(shardio(*words).stdout)
    assert {"memcpy", "take"} <= facts["limits"].keys()


@pytest.mark.parametrize("columns", [0, 40, 100])
def test_a_bar_is_shown_on_a_terminal_whatever_width_it_tells(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    here, there = os.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("4H", 0, columns, 0, 0))
    with os.fdopen(here, "rb", buffering=0) as terminal, os.fdopen(there, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Bar(total=10, unit=" images") as bar:
            bar.update(10)
        data = b""
        while not data.endswith(b"\n"):  # a terminal hands on what was written bit by bit
            data += terminal.read(10_000)
    shown = data.decode().splitlines()
    assert any("10/10" in line for line in shown)
    assert 30 < max(map(len, shown)) < (columns or 200)


def test_a_log_gets_a_line_every_so_often_and_none_of_what_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w+") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Bar(total=10) as bar:
            bar.update(10)
        monkeypatch.setattr("shardio.system.progress._LOG_SECONDS", 0.01)
        with Bar(total=4, unit=" images") as bar, bar.before_it_begins("scanning images/"):
            time.sleep(0.05)  # a wait before the first count is told of
            bar.begun()
            for _ in range(3):
                time.sleep(0.02)
                bar.update(1)
            bar.update(1)
        stderr.seek(0)
        lines = stderr.read().splitlines()
    first = next(number for number, line in enumerate(lines) if "1/4" in line)
    assert first
    assert all(line.startswith("scanning images/: ") for line in lines[:first])
    assert [re.findall(r"\d/4", line) for line in lines[first:]] == [["1/4"], ["2/4"], ["3/4"], ["4/4"]]
    assert "scanning" not in " ".join(lines[first:])
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize("gone", [None, "closed"])
def test_a_bar_never_raises_where_stderr_is_gone(gone: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = None
    if gone:
        stream = open(os.devnull, "w")  # noqa: SIM115
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("shardio.system.progress._LOG_SECONDS", 0.0)
    with Bar(total=3) as bar, bar.before_it_begins("waiting"):
        bar.reach(2, 3)
    assert bar.n == 2


def test_convert_shows_a_bar_from_python(
    image_tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardio.system.progress._LOG_SECONDS", 0.0)
    seen: list[Progress] = []
    convert(image_tree, image_tree.parent / "out", size=8, workers=1, progress=True, on_progress=seen.append)
    lines = capsys.readouterr().err.splitlines()
    assert "18/18" in lines[-1]
    assert seen[-1].done == 18
    convert(image_tree, image_tree.parent / "silent", size=8, workers=1)
    assert capsys.readouterr().err == ""


def test_help_names_every_command_once() -> None:
    listed = re.findall(r"^  ([a-z]\S*) ", shardio("--help").stdout.rpartition("--help")[2], re.MULTILINE)
    modules = [import_module(f"shardio.cli.{path.stem}") for path in (ROOT / "shardio" / "cli").glob("*.py")]
    commands = {value.name for module in modules for value in vars(module).values() if isinstance(value, click.Command)}
    assert sorted(listed) == sorted(commands - {"cli"})


@pytest.mark.parametrize(
    ("words", "same"), [([], ["--help"]), (["help"], ["--help"]), (["help", "view"], ["view", "--help"])]
)
def test_help_needs_no_hyphens(words: list[str], same: list[str]) -> None:
    result = shardio(*words)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == shardio(*same).stdout
    assert result.stdout.startswith("Usage: shardio")


def test_a_command_imports_nothing_slow_that_it_does_not_need(
    make_set: Callable[..., Path], image_tree: Path, tmp_path: Path
) -> None:
    code = """
import sys, shardio.cli.main
for line in sys.stdin:
    sys.argv[1:] = line.split()
    shardio.cli.main._run()
    print(*sorted({"torch", "numpy", "tqdm", "PIL"} & set(sys.modules)), file=sys.stderr)
"""
    commands = ["--help", "convert --help", f"info {make_set(3)}", f"convert {image_tree} {tmp_path}/new --size 16"]
    result = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(commands), capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line for line in result.stderr.splitlines() if not line.startswith("shardio: ")]
    assert lines == ["", "", "numpy", "PIL numpy tqdm"]
    assert (tmp_path / "new" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("command", "code", "word"),
    [
        ("info {out} | true", 0, ""),
        ("info {out} >&-", 1, "stdout"),
        ("info {out} >&- 2>&-", 1, ""),
        ("convert {images} {tmp}/a --size 16 >/dev/null 2>&-", 0, ""),
    ],
    ids=["closed pipe", "no stdout", "no stdout and no stderr", "no stderr"],
)
def test_a_closed_stream_is_an_error_of_at_most_one_line(
    converted: Path, image_tree: Path, tmp_path: Path, command: str, code: int, word: str
) -> None:
    words = f"{sys.executable} -m shardio {command.format(out=converted, images=image_tree, tmp=tmp_path)}"
    result = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert word in result.stderr
    assert result.stderr.count("\n") <= bool(word)


def test_the_error_of_a_long_path_is_short() -> None:
    result = shardio("info", "x" * 5000)
    assert_one_clear_error(result, 1, "too long")
    assert len(result.stderr) < 1100


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        RuntimeError("can't start new thread"),
        *(OSError(code, "?") for code in (errno.EMFILE, errno.EFBIG, errno.ENOMEM, errno.EAGAIN)),
    ],
)
def test_a_limit_of_the_machine_is_an_error_of_one_line_that_names_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "cli", raising(error))
    assert main._run() == 1
    said = capsys.readouterr().err
    assert "ulimit" in said
    assert said.count("\n") == 1


def test_a_second_ctrl_c_while_the_first_is_reported_prints_no_traceback() -> None:
    code = """
from unittest import mock
from shardio.cli import main
from shardio.cli.output import next_step
main.cli = main.say = mock.Mock(side_effect=KeyboardInterrupt)
main.main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (130, b"")


@pytest.mark.parametrize("workers", [1, 3])
def test_ctrl_c_exits_at_once_with_130_and_the_same_command_goes_on(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "images" / "a"
    write_jpeg(folder / "0.JPEG", random_picture(np.random.default_rng(3), 900, 900))
    for number in range(1, 240):
        os.link(folder / "0.JPEG", folder / f"{number}.JPEG")
    out = tmp_path / "out"
    words = ["convert", tmp_path / "images", out, "--size", "64", "--shard-size", "200kB", "--workers", workers]
    words += ["--labels", "folders"]
    command = [sys.executable, "-m", "shardio", *map(str, words)]
    begun = time.monotonic()
    # A group of its own, signaled as a terminal does it: parent and workers alike.
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    # A shard counts from its record on, which follows it.
    until(lambda: list(out.glob(".convert/train-*.json")) or process.poll() is not None)
    interrupted = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    ended = time.monotonic()
    assert process.returncode == 130, stderr
    # One second is promised on an idle machine. On a busy one too, a start takes at least twice as long as the end.
    assert ended - interrupted < interrupted - begun
    said = stderr.splitlines()[-1]
    assert said.endswith(f" of 240 images are kept in {out}; run the same command again to resume")
    kept = said.removeprefix("shardio: interrupted: ").split()[0]
    assert not (out / "manifest.json").exists()
    assert not list(out.glob(".*.tmp"))
    again = shardio(*words, "--json")
    assert again.stderr.endswith(f"shardio: resuming: {kept} of 240 samples were kept\n")
    report = json.loads(again.stdout)
    assert report["num_samples"] == {"train": 240}
    assert report["num_converted"] == 240 - int(kept)
