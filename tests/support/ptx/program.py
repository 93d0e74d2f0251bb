"""Reads a kernel from PTX, in the form in which LLVM writes it for Triton."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """`guard` is the predicate register of `@%p1`, or None. `targets` are the places that a branch may lead to."""

    text: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    is_negated: bool
    targets: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        return self.modifiers[-1]


@dataclass(frozen=True)
class Program:
    """`widths` has the number of bits of each declared register, by the name without its number; predicates have 1.

    `local` has the name and the size of each thread's own memory, in bytes, if it has any.
    """

    parameters: tuple[str, ...]
    num_threads: int
    widths: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: frozenset[int]
    local: tuple[str, int] | None


# Lines that neither do nor declare anything that is executed.
_UNUSED_LINE = re.compile(r"//[^\n]*|^\s*\.(loc|file|section|pragma)\b[^\n]*$", re.MULTILINE)
_STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+):(?!:)|(?P<text>[^;]*);)")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", re.DOTALL)
_LOCAL = re.compile(r"\.local \.align \d+ \.b8\s+(\w+)\[(\d+)\]$")
_REGISTERS = re.compile(r"\.reg \.(pred|[busf]\d+)\s+(.*)$")


def parse(ptx: str) -> Program:
    """Returns the only kernel of a module of PTX."""
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
    assert threads is not None, "the number of threads of a block is not declared"
    widths: dict[str, int] = {}
    labels: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    found: list[tuple[str, str]] = []
    last_label, local = "", None
    for kind, text in _statements(body):
        if kind == "label":
            last_label = text
            labels[text] = len(found)
        elif declared := _REGISTERS.match(text):
            bits = 1 if declared[1] == "pred" else int(declared[1][1:])
            widths |= {re.sub(r"<\d+>", "", name.strip()): bits for name in declared[2].split(",")}
        elif declared := _LOCAL.match(text):
            local = declared[1], int(declared[2])
        elif text.startswith(".branchtargets"):
            tables[last_label] = re.findall(r"[$\w]+", text.removeprefix(".branchtargets"))
        else:
            found.append((kind, text))
    instructions = []
    for _, text in found:
        instruction = _parse_instruction(text)
        if instruction.name in ("bra", "brx"):
            name = instruction.operands[-1]
            targets = tuple(labels[target] for target in tables.get(name, [name]))
            instruction = Instruction(**{**vars(instruction), "targets": targets})
        instructions.append(instruction)
    return Program(
        tuple(re.findall(r"\.param[^,)]*?(\w+)\s*(?:,|\))", head)),
        int(threads[1]),
        widths,
        tuple(instructions),
        frozenset(labels.values()),
        local,
    )


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Yields labels and statements up to the brace that ends the kernel. Inner braces only limit names of registers."""
    text, at, depth = _UNUSED_LINE.sub("", body), 0, 1
    while depth:
        match = _STATEMENT.match(text, at)
        assert match is not None, f"not a statement: {text[at : at + 80]!r}"
        at = match.end()
        if match["brace"]:
            depth += 1 if match["brace"] == "{" else -1
        elif match["label"]:
            yield "label", match["label"]
        elif statement := " ".join(match["text"].split()):
            yield "text", statement


def _parse_instruction(text: str) -> Instruction:
    match = _INSTRUCTION.match(text)
    assert match is not None, f"not an instruction: {text!r}"
    name, *modifiers = match[3].replace("::cta", "").split(".")
    # Commas between braces separate the parts of a vector, others the operands.
    operands = [operand.strip(" []") for operand in re.split(r",(?![^{]*\})", match[4]) if operand]
    return Instruction(text, name, tuple(modifiers), tuple(operands), match[2], match[1] == "!")
