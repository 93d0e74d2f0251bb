"""What the shell completes, in real shells where they are installed; and help that fits a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardio.cli.main import cli


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which `shardio` is this one, and which has a catalogue."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shardio"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardio "$@"\n')
    command.chmod(0o755)
    (tmp_path / "sets" / "tiny-imagenet").mkdir(parents=True)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "SHARDIO_PATH": str(tmp_path / "sets"), "HOME": str(tmp_path)}


def completed(words: str, environ: dict[str, str]) -> list[str]:
    """Returns what bash is offered for a line; the last word is incomplete."""
    parts = words.split(" ")
    answer = subprocess.run(
        ["shardio"],
        env={
            **environ,
            "_SHARDIO_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(parts) - 1),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stderr == ""
    return answer.stdout.splitlines()


def test_commands_options_sets_splits_and_classes_are_completed(
    environ: dict[str, str], make_set: Callable[..., Path]
) -> None:
    out = make_set(20)
    assert completed("shardio conv", environ) == ["plain,convert"]
    assert completed("shardio convert --fi", environ) == ["plain,--fit"]
    assert completed("shardio convert --fit c", environ) == ["plain,crop"]
    assert completed("shardio info tiny", environ) == ["plain,tiny-imagenet", "dir,tiny"]
    assert completed(f"shardio view {out} --split t", environ) == ["plain,train"]
    assert completed(f"shardio find {out} --class c6", environ) == ["plain,c6"]
    assert completed("shardio find nowhere --class c6", environ) == [""]


@pytest.mark.parametrize(
    ("shell", "check"),
    [
        ("bash", ["bash", "--norc", "-c", "source /dev/stdin && complete -p shardio"]),
        ("zsh", ["zsh", "-f", "-c", "autoload -U compinit; compinit -D; source /dev/stdin; print $_comps[shardio]"]),
        ("fish", ["fish", "--no-config", "-c", "source -; complete -c shardio"]),
    ],
)
def test_shells_take_the_script(shell: str, check: list[str], environ: dict[str, str]) -> None:
    script = CliRunner().invoke(cli, ["completion", shell], catch_exceptions=False).stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    result = subprocess.run(check, input=script, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "shardio" in result.stdout, result.stderr


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_help_fits_a_terminal_of_80_columns(command: str) -> None:
    words = [command, "--help"] if command else ["--help"]
    text = CliRunner().invoke(cli, words, terminal_width=80, catch_exceptions=False).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_what_was_mistyped_is_told_with_what_was_meant() -> None:
    for words, told in (
        (["conver"], "Error: expected a command of shardio, found 'conver': did you mean convert?"),
        (["nothing-like-it"], "Error: expected a command of shardio, found 'nothing-like-it'\n"),
        (["convert", "--siz", "3", "a", "b"], "--size"),
    ):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 2
        assert told in result.output
