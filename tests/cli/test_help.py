"""Help that fits a terminal, completion by click, and suggestions for mistyped words."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner
from command import run_forked

from shardio.cli.main import cli


def test_click_completes_commands_and_options() -> None:
    def completed(words: str) -> str:
        variables = {"_SHARDIO_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return run_forked("shardio", env=os.environ | variables).stdout

    assert completed("shardio conv") == "plain,convert\n"
    assert completed("shardio convert --fit c") == "plain,crop\n"


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
