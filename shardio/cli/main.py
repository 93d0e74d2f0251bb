"""The command line.

Exit codes are 0 for success, 1 for an error (a bad file, a full disk, damage found), 2 for wrong usage, 130 for an
interrupt. An error is one or two lines on stderr, or more if it lists many images. Results go to stdout, as JSON with
`--json`; progress bars go to stderr if stderr is a terminal.

Related commands share a module. Commands import slow libraries only when they run, so help and usage errors appear at
once, and `shardio info` never loads torch.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from shardio.cli.change import change, merge
from shardio.cli.convert import convert, plan, repair, verify
from shardio.cli.find import extract, find
from shardio.cli.info import info
from shardio.cli.output import say
from shardio.cli.share import evict, list_sets, publish, stage
from shardio.cli.train import bench, replay
from shardio.cli.view import report, view
from shardio.conversion.sources.doubt import DoubtError
from shardio.errors import LONGEST_LINE, ShardioError, did_you_mean, printable, shortened
from shardio.system.opening import limit_hint
from shardio.version import __version__

# As the help lists them.
COMMANDS: dict[str, list[click.Command]] = {
    "Make a set": [convert, plan, verify, repair],
    "Look at it": [info, view, find, extract, report],
    "Make a new set from it": [change, merge],
    "Train with it": [bench, replay],
    "Share it": [publish, list_sets, stage, evict],
}


class _Group(click.Group):
    """The group of all commands. Help lists commands by purpose; a mistyped command brings a suggestion."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        calls = {
            command: " ".join([str(command.name), *command.collect_usage_pieces(click.Context(command))[1:]])
            for commands in COMMANDS.values()
            for command in commands
        }
        longest = max(map(len, calls.values()))
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                rows = [(calls[command].ljust(longest), command.get_short_help_str(80)) for command in commands]
                formatter.write_dl(rows, col_max=longest)

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        # Without words click raises an error from 8.2 on, whose message is the whole help.
        if not context.resilient_parsing and (not words or words[0] == "help"):
            words = [*words[1:2], "--help"]
        return super().parse_args(context, words)

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if words and not words[0].startswith("-") and self.get_command(context, words[0]) is None:
            meant = did_you_mean(words[0], self.commands)
            raise click.UsageError(f"expected a command of shardio, found {words[0]!r}{meant}", context)
        return super().resolve_command(context, words)


@click.group(
    cls=_Group,
    commands=[command for commands in COMMANDS.values() for command in commands],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(__version__, help="Show the version and exit.")
def cli() -> None:
    """Image collections as memory-mapped shards, for training that never waits for data.

    `shardio convert imagenet/ out/` makes a set. `shardio COMMAND --help` explains a command.
    """


def main() -> NoReturn:
    """Runs the command line, then exits the process. Expected errors become a line on stderr and an exit code."""
    # A file would get the number of a closed standard descriptor, and then our output: /dev/null takes the number.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names may have characters that a terminal lacks
    codes: list[int] = []
    # The function that is registered first runs last, when threads, files and semaphores are done with.
    atexit.register(_end_at_once, codes)
    if sys.stdout is None:
        codes.append(_fail("stdout is closed: redirect it to a file or /dev/null"))
    else:
        try:
            codes.append(_run())
        except KeyboardInterrupt:  # a second one, while the first is reported
            codes.append(130)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of what runs at exit
    sys.exit(codes[0])


def _end_at_once(codes: Sequence[int]) -> None:
    """Ends the process with the code in `codes`, if any, without Python's cleanup: torch's would slow down a Ctrl-C."""
    if codes:  # none: Python prints the traceback of an unexpected error first
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:  # it was closed from the beginning
                    stream.flush()
        os._exit(codes[0])


def _fail(text: object, hint: str = "") -> int:
    say(f"shardio: error: {shortened(str(text), LONGEST_LINE)}{hint}", err=True)
    return 1


def _run() -> int:
    """Runs the command in sys.argv, and returns the exit code."""
    try:
        cli(prog_name="shardio", standalone_mode=False)
    except SystemExit as verdict:  # a command that checks something ends so
        return int(verdict.code or 0)
    except click.ClickException as error:
        vars(error).update(message=printable(error.message))  # click repeats some words as they were given
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        kept = str(error.__cause__ or error)  # click makes an Abort of a KeyboardInterrupt
        say(f"shardio: interrupted{f': {kept}; run the same command again to resume' if kept else ''}", err=True)
        return 130
    except BrokenPipeError as error:
        if error.filename is not None:  # a FIFO for which the user asked
            return _fail(error)
        # The reader of our output went away. Keep the interpreter from writing the rest, and complaining, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ShardioError as error:
        text = str(error.with_args(sys.argv[1:]) if isinstance(error, DoubtError) else error)
        click.echo(f"shardio: error: {text}", err=True)
        return 1
    except OSError as error:
        # EAGAIN: no process can be started.
        return _fail(error, limit_hint(errno.ENOMEM if error.errno == errno.EAGAIN else error.errno, error.strerror))
    except ImportError as error:  # a library that is missing or broken
        return _fail(error)
    except MemoryError as error:
        return _fail(str(error) or "out of memory", limit_hint(errno.ENOMEM))
    except RuntimeError as error:
        if not any(words in str(error) for words in ("start new thread", "allocate memory")):  # the latter is torch's
            raise
        return _fail(error, limit_hint(errno.ENOMEM, error))
    except ValueError as error:  # an option's value that only the code behind it can judge
        _fail(error)
        return 2
    return 0
