"""Parsers of option values, and the options that several commands share.

Each `parse_...` function returns the value of an option's text. Its ValueError names only the expected form.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from shardio.conversion.options import ConvertOptions, literal_of
from shardio.errors import ShardioError

if TYPE_CHECKING:
    from shardio.augment import Transform

# More are better kept in a file.
_MOST_NUMBERS = 10_000

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Returns a click callback, which returns `parse` of an option's text, or None if the option is missing."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(value.strip())
        except ValueError as error:
            raise click.BadParameter(f"expected {error}; found {value!r}") from None

    return callback


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Returns a decorator that adds `options` to a command. Help lists the options in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


def parse_nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError("a size such as 4GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match:
        raise ValueError("pixels such as 256, or HEIGHTxWIDTH such as 224x320")
    return int(match[1]), int(match[2] or match[1])


def parse_max_bad(text: str) -> int | float:
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text)
    if not match or (match[2] and float(match[2]) > 100):
        raise ValueError("a number of images such as 10, or a share from 0% to 100% such as 1%")
    return int(match[1]) if match[1] else float(match[2]) / 100


def parse_share(text: str) -> float:
    match = re.fullmatch(r"(\d*\.?\d+)(%?)", text)
    share = float(Fraction(match[1]) / (100 if match[2] else 1)) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError("a share such as 5% or 0.05, more than 0 and at most 100%")
    return share


def parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("K/N with K from 1 to N, such as 3/16")
    return int(match[1]), int(match[2])


def _find_set(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    from shardio.sets.names import local_folder

    return Path(local_folder(value))


class CommonFirst(click.Command):
    """A command whose help lists the options named `common` first, and all others under "Rarely needed"."""

    def __init__(self, *arguments: Any, common: Sequence[str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.common = {*common, "as_json", "help"}

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [one for one in self.get_params(context) if isinstance(one, click.Option)]
        for title, is_common in (("Options", True), ("Rarely needed", False)):
            rows = (one.get_help_record(context) for one in options if (one.name in self.common) == is_common)
            with formatter.section(title):
                formatter.write_dl([row for row in rows if row])


folder = click.Path(path_type=Path)
path_text = click.Path()
"""A text that is, or may begin or end with, a path: a shell completes it as a path."""
output_file = click.Path(path_type=Path, dir_okay=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
set_argument = click.argument("out", type=path_text, callback=_find_set)
"""The argument OUT: the folder of a set."""


def _parse_mix(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in values:
        path, _, share = text.rpartition("=")
        if not path or not re.fullmatch(r"\d*\.?\d+", share):
            raise click.BadParameter(f"expected SET=SHARE, such as places/=0.5; found {text!r}")
        found[path] = share
    return found


mix_option = click.option(
    "--mix",
    multiple=True,
    metavar="SET=SHARE",
    type=path_text,
    callback=_parse_mix,
    help="Mix OUT, whose share is 1, with another set. May be given several times.",
)


def workers_option(help: str, default: int) -> Callable[[Command], Command]:
    return click.option("--workers", type=click.IntRange(1), default=default, help=help)


table_options = together(
    click.option(
        "--table",
        "tables",
        multiple=True,
        metavar="[SPLIT=]FILE",
        type=path_text,
        help="Table that describes the images in SRC: CSV, JSON lines or parquet, with paths relative to SRC. One, or "
        "one for each split.",
    ),
    click.option(
        "--root",
        metavar="DIR|OLD=NEW",
        type=path_text,
        help="Folder of paths, if SRC is a table; or what to replace at their beginning.  [default: its own folder]",
    ),
    click.option("--path-column", metavar="NAME", default="", show_default="guessed", help="Column of paths."),
    click.option(
        "--label-column",
        "label_columns",
        multiple=True,
        metavar="NAME",
        help="Column of classes or numbers; given again for a vector.  [default: guessed]",
    ),
    click.option(
        "--label-separator", metavar="TEXT", default="", help="Text between the labels in a cell that has several."
    ),
    click.option(
        "--split-column", metavar="NAME", default="", show_default="guessed", help="Column of splits. none: no column."
    ),
    click.option(
        "--group-column", metavar="NAME", default="", help="Column of groups that --val keeps together, as of patients."
    ),
    click.option(
        "--column",
        "columns",
        multiple=True,
        metavar="NAME",
        help="Column of numbers to store as an array. May be given again.",
    ),
)
"""Adds the options that describe tables. `with_tables` makes arguments of `convert` from their values."""


def with_tables(src: Path, tables: Sequence[str], **others: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (source, options) to pass to `convert`. `others` are the values of all options except --table.

    With --table, the options get a `table`, and the source is `src`. Without it, options such as --root describe `src`
    itself: the source is then a `Table`.
    """
    from shardio.conversion.sources.table import Table

    names = ("root", "path_column", "label_columns", "label_separator", "split_column", "group_column", "columns")
    given = {name: others.pop(name) for name in names}
    if not tables:
        return Table(src, **given) if any(given.values()) else src, others
    named = [text.partition("=") if "=" in text and not os.path.exists(text) else ("", "", text) for text in tables]
    found = {split: Table(file, **given) for split, _, file in named}
    if len(found) < len(named) or ("" in found and len(found) > 1):
        raise click.BadParameter(
            f"expected one FILE, or SPLIT=FILE once per split; found {', '.join(tables)}", param_hint="--table"
        )
    return src, {**others, "table": found.get("", found) if len(found) == 1 else found}


random_seed = click.IntRange(0, (1 << 64) - 1)


def parse_indices(text: str) -> list[int] | Path:
    """Returns the integers in a text such as 5,17 or 3-7; or the path, if the text is the path of a file."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isascii() or not first.isdigit() or (dash and not (last.isascii() and last.isdigit())):
            if text.endswith(".npy") or os.path.exists(text):
                return Path(text)
            raise ValueError("sample numbers such as 5,17 or 0-23, or the path of an NPY file")
        if int(last or first) < int(first):
            raise ValueError("ranges from the smaller number to the larger, such as 0-23")
        numbers += range(int(first), min(int(last or first), int(first) + _MOST_NUMBERS) + 1)
        if len(numbers) > _MOST_NUMBERS:
            raise ValueError(f"at most {_MOST_NUMBERS:,} sample numbers, or the path of an NPY file")
    return numbers


def _complete_class(context: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    from shardio.format.manifest_file import load_manifest

    with contextlib.suppress(OSError, ShardioError):  # a shell shows no errors
        # OUT is a left-over argument as long as an option lacks its value.
        manifest = load_manifest(Path(context.params.get("out") or "".join(context.args[:1])))
        names = dict(zip(manifest.classes, manifest.class_names or manifest.classes, strict=True))
        return [CompletionItem(name, help=text) for name, text in names.items() if name.startswith(start)]
    return []


split_option = click.option("--split", default="train", help="Split to use.")
splits_option = click.option(
    "--split", multiple=True, metavar="NAME", help="Split to use. May be given again.  [default: all]"
)
_CHOOSE = {
    "classes": click.option(
        "--class",
        "selected",
        multiple=True,
        metavar="CLASS",
        shell_complete=_complete_class,
        help="Class by name, display name or number. May be given again.",
    ),
    "keys": click.option(
        "--key",
        "keys",
        multiple=True,
        metavar="PATTERN",
        help="Pattern of keys, with * and ?. May be given again.",
    ),
    "where": click.option(
        "--where",
        multiple=True,
        metavar="'NAME >= NUMBER'",
        help="Comparison of an array or a field of the index, such as 'source_width < 500'. May be given again; "
        "samples must match every comparison.",
    ),
    "listed": click.option(
        "--list", "listed", type=folder, metavar="FILE", help="File of keys: one per line, NPY or NPZ."
    ),
    "random": click.option(
        "--random",
        callback=parsed(parse_share),
        metavar="P%",
        help="Choose this share of the matching samples at random.",
    ),
    "seed": click.option("--seed", type=random_seed, default=0, help="Seed of --random."),
    "indices": click.option(
        "--indices",
        callback=parsed(parse_indices),
        type=path_text,
        metavar="5,17,0-9|FILE.npy",
        help="Numbers of samples of one split, in this order; or an NPY file with numbers or a mask.",
    ),
}


def selection_options(*more: str) -> Callable[[Command], Command]:
    """Returns a decorator that adds --class, --key, --where and the options that `more` names.

    The command gets their values as one argument, `selection`: a `Selection`. `more` names arguments of `Selection`.
    """
    names = ("classes", "keys", "where", *more)

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(selected: Sequence[str], **options: Any) -> Any:
            from shardio.sets.selection import Selection

            given = {name: options.pop(name) for name in names if name != "classes"}
            return command(selection=Selection(classes=selected, **given), **options)

        return together(*(_CHOOSE[name] for name in names))(call)  # type: ignore[return-value]

    return add


# --- the options of commands that show pictures -----------------------------------------------------------------------


sheet_options = together(
    click.option("--side", type=click.IntRange(1, 4096), help="Longer side of a picture on the sheet, in pixels."),
    click.option("-o", "--output", type=output_file, help="Write the sheet to this PNG file instead of the terminal."),
)


def read_chain(text: str, num_classes: int) -> Transform:
    """Returns the recipe named `text`, for `num_classes` classes, or the transform in the JSON file `text`.

    The file holds the result of the transform's `to_dict`. Raises ValueError if `text` is neither.
    """
    from shardio.augment import Transform, from_dict, recipe
    from shardio.augment.recipes import RECIPES
    from shardio.system.opening import read_untrusted

    if not text.endswith(".json") and not os.path.exists(text):
        try:
            return recipe(text, num_classes=num_classes)
        except ValueError:
            if num_classes or text not in RECIPES:
                raise
            raise ValueError(f"{text}: expected a set with classes, as this recipe mixes labels; found none") from None
    try:
        made = from_dict(json.loads(read_untrusted(Path(text))))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{text}: not the JSON that `to_dict` of a transform returns: {error}") from None
    if not isinstance(made, Transform):
        raise ValueError(f"{text}: expected a transform, found {type(made).__name__}")
    return made


# --- the options of convert -------------------------------------------------------------------------------------------


_PARSERS: dict[str, tuple[Callable[[str], Any], str | None]] = {
    "size": (parse_size, str(ConvertOptions.size)),
    "shard_size": (parse_nbytes, f"{ConvertOptions.shard_size >> 30}GiB"),
    "max_bad": (parse_max_bad, f"{ConvertOptions.max_bad:.0%}"),
    "part": (parse_part, None),
    "val": (parse_share, None),
}
"""Name of an option of `convert` -> (the parser of its text, the text of its default)."""


def convert_options(*names: str) -> Callable[[Command], Command]:
    """Returns a decorator that adds the options of `convert` in `names`; without names, all that have a help text."""
    found = {one.name: one for one in fields(ConvertOptions) if "help" in one.metadata}
    return together(*(_made_option(found[name]) for name in names or found))


def _made_option(one: Field[Any]) -> Callable[[Command], Command]:
    literal, metavar, least = literal_of(one), one.metadata["metavar"], one.metadata["least"]
    made: dict[str, Any] = {"help": one.metadata["help"], "metavar": metavar, "default": one.default}
    if one.type is bool:
        made["is_flag"] = True
    elif literal is not None:
        made["type"] = click.Choice(get_args(literal))
    elif least is not None:
        made["type"] = click.IntRange(least)
    elif metavar == "DIR":
        made["type"] = folder
    elif one.name in _PARSERS:
        parse, made["default"] = _PARSERS[one.name]
        made["callback"] = parsed(parse)
    return click.option(f"--{one.name.replace('_', '-')}", **made)
