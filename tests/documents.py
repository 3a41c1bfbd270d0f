"""The Python of the documents: which blocks a page has, and what is to be run of them.

A block marked `python` is run: all blocks of a page one after the other, in one process. One marked `py`, or that
follows the comment `<!-- not run: REASON -->`, is only compiled: it needs a cluster, or what is not installed. After
`<!-- new program -->` the blocks that follow are another program, in a process of their own.
"""

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]
_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,})(?P<language>[^\s`]*)[^`]*$")
_NOT_RUN = re.compile(r"\s*<!-- not run: .+ -->\s*$")
_NEW_PROGRAM = re.compile(r"\s*<!-- new program -->\s*$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A piece of Python in a page.

    Args:
        line: Of its first line of code, from 1.
        code: Without the indentation of the block.
        is_run: Whether it is more than compiled.
        begins: Whether it is the first of a program.
    """

    line: int
    code: str
    is_run: bool
    begins: bool


def blocks_of(page: str) -> list[Block]:
    """The blocks of Python in the text of a page, in order."""
    found: list[Block] = []
    lines = page.splitlines()
    not_run = begins = False
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            not_run = bool(_NOT_RUN.match(lines[number])) or (not_run and not lines[number].strip())
            begins = begins or bool(_NEW_PROGRAM.match(lines[number]))
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != opened["fence"]:
            end += 1
        if opened["language"] in ("python", "py"):
            code = "".join(line.removeprefix(opened["indent"]) + "\n" for line in lines[number + 1 : end])
            is_run = opened["language"] == "python" and not not_run
            found.append(Block(number + 2, code, is_run, begins))
            begins = begins and not is_run
        not_run = False
        number = end + 1
    return found


def programs_of(page: str) -> list[str]:
    """The programs of a page; each has its lines where the page has them."""
    programs: list[list[str]] = []
    for block in blocks_of(page):
        if not block.is_run:
            continue
        if block.begins or not programs:
            programs.append([])
        lines = programs[-1]
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    return ["\n".join(lines) + "\n" for lines in programs]
