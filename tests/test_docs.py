"""What the documents say is real: code runs, paths exist, the tree is the tree."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import stratagem
from tests.cluster import nursery

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "examples/README.md",
]
RELIABILITY = (ROOT / "docs/reliability.md").read_text()
MODULES = sorted(module.name for module in pkgutil.walk_packages(stratagem.__path__, "stratagem."))
MODULES.remove("stratagem.__main__")


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for kind, content in found if kind == language]


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks(README, "python"))
def test_code_in_the_readme_runs(code: str, tmp_path: Path, forked_tasks: None) -> None:
    done = nursery.run(["-W", "error", "-c", code], 50, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_output_in_the_readme_is_what_the_command_prints() -> None:
    shown = next(block for block in blocks(README, "") if block.startswith("$ ")).splitlines()
    variable, *command = shown[0].removeprefix("$ ").split()
    name, value = variable.split("=")
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=50, env={name: value}, check=True
    )
    # Models, cores and sizes are the machine's; titles, columns, devices and notes are not.
    assert [_beginning(line) for line in shown[1:]] == [_beginning(line) for line in done.stdout.splitlines()]
    for line in (line for line in shown if line.lstrip().startswith("device ")):
        assert line.split() in [each.split() for each in done.stdout.splitlines()]


def _beginning(line: str) -> str:
    first = line.split(maxsplit=1)[0] if line.split() else ""
    return "─" if first.startswith("─") else first


def test_examples_in_docstrings_run(fork_server: None) -> None:
    results = {module: doctest.testmod(importlib.import_module(module)) for module in MODULES}
    assert not [module for module, result in results.items() if result.failed]
    assert sum(result.attempted for result in results.values()) > 20


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]*)`", text)]
    assert not [path for path in links + paths if not path.exists()]


def test_readme_of_the_examples_lists_every_one() -> None:
    examples = ROOT / "examples"
    files = {file for kind in ("py", "ipynb") for file in examples.glob(f"**/*.{kind}")}
    listed = {examples / link for link in re.findall(r"\]\(([^)#:]+)\)", (examples / "README.md").read_text())}
    assert files <= listed


def test_architecture_lists_every_file_of_the_source() -> None:
    (tree,) = blocks((ROOT / "docs/architecture.md").read_text(), "")
    listed, folders = set(), {}
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth] = name.rstrip("/")
        if not name.endswith("/"):
            listed.add("/".join(folders[each] for each in range(depth + 1)))
    assert listed == {str(file.relative_to(ROOT)) for file in ROOT.glob("src/**/*.py")}


def test_architecture_says_of_every_file_what_the_file_says() -> None:
    (tree,) = blocks((ROOT / "docs/architecture.md").read_text(), "")
    folders: dict[int, str] = {}
    for line in tree.splitlines():
        name, _, remark = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth] = name.rstrip("/")
        if name.endswith(".py") and name != "__init__.py":
            file = ROOT.joinpath(*(folders[each] for each in range(depth + 1)))
            said = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
            assert said.lower().startswith(remark.strip().lower()), f"{file.name}: {remark.strip()!r}"


def test_makefile_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.MULTILINE)) <= targets


def test_reliability_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w./-]+)::(\w+)`", RELIABILITY)
    assert len(named) == RELIABILITY.count("::")
    known = {path: functions_in(ROOT / path) for path in {path for path, _ in named}}
    assert not [f"{path}::{name}" for path, name in named if name not in known[path]]


def functions_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_reliability_has_a_row_for_every_mark_in_tests() -> None:
    used = {mark for file in ROOT.glob("tests/**/*.py") for mark in marks_in(file)}
    assert used
    assert used <= reliability_rows().keys()


def test_reliability_says_for_every_row_what_holds_it() -> None:
    for mark, held in reliability_rows().items():
        assert "::" in held or "no test yet: " in held, mark


def reliability_rows() -> dict[str, str]:
    """What each row has in its last column, by the mark of the row."""
    rows = re.findall(r"^\| ([FEA]?\d+b?) \|.*\| (.*) \|$", RELIABILITY, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a mark stands for one row"
    return dict(rows)


def marks_in(file: Path) -> set[str]:
    """The marks of reliability.md in the comments and docstrings of a file."""
    tree = ast.parse(file.read_text())
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    texts = [ast.get_docstring(node) or "" for node in nodes]
    with file.open("rb") as lines:
        texts += [token.string for token in tokenize.tokenize(lines.readline) if token.type == tokenize.COMMENT]
    without_lint = (re.sub(r"noqa: [\w, ]+", "", text) for text in texts)
    return {mark for text in without_lint for mark in re.findall(r"\b[FEA]\d+\b", text)}
