"""Help that fits a terminal, completion by click, and suggestions for mistyped words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from command import run_forked

from shardio.cli.main import cli


def test_click_completes_commands_options_classes_and_paths(make_set: Callable[..., Path]) -> None:
    def completed(words: str) -> str:
        variables = {"_SHARDIO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return run_forked("shardio", env=os.environ | variables).stdout

    assert completed("shardio conv") == "plain,convert\n"
    assert completed("shardio convert --fit c") == "plain,crop\n"
    out = make_set(9)
    assert completed(f"shardio find {out} --class c") == "".join(f"plain,c{label}\n" for label in range(7))
    for words in (
        "view o",
        "find o",
        "stage o",
        "list o",
        "merge a o",
        "convert a b --table train=o",
        "bench o --mix o",
    ):
        assert completed(f"shardio {words}").startswith("file,"), words
    assert completed("shardio view nothing --class c") == "\n"


def test_help_of_convert_lists_nine_options_before_those_that_few_need() -> None:
    text = CliRunner().invoke(cli, ["convert", "--help"]).stdout
    common, rare = (re.findall(r"^  (?:-\w, )?(--[\w-]+)", part, re.MULTILINE) for part in text.split("Rarely needed:"))
    assert len(common) == 10  # with --json
    assert len({*common, *rare}) == len(cli.commands["convert"].params) - 1  # SRC, OUT, and --help


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_help_fits_a_terminal_of_80_columns(command: str) -> None:
    words = [command, "--help"] if command else ["--help"]
    text = CliRunner().invoke(cli, words, terminal_width=80, catch_exceptions=False).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["conver"], "found 'conver': did you mean convert?"),
        (["nothing-like-it"], "found 'nothing-like-it'\n"),
        (["convert", "--siz", "3", "a", "b"], "--size"),
    ],
)
def test_a_mistyped_word_brings_a_suggestion(words: list[str], suggestion: str) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert suggestion in result.output
