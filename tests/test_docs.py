"""What the documents say is real: paths exist, code compiles, names and pictures are those of the source.

`tests/test_documents_run.py` runs their code; `make test-docs` also runs that of docstrings.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import stratagem
from docs import draw_pictures, make_site
from stratagem import _env
from tests import documents

ROOT = documents.ROOT
DOCUMENTS = documents.PAGES
COMMAND_LINE = (ROOT / "docs/reference/command_line.md").read_text()
RELIABILITY = (ROOT / "docs/reliability.md").read_text()
MODULES = sorted(module.name for module in pkgutil.walk_packages(stratagem.__path__, "stratagem."))
MODULES.remove("stratagem.__main__")


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for kind, content in found if kind == language]


@pytest.mark.slow
def test_output_in_the_reference_is_what_the_command_prints() -> None:
    shown = next(block for block in blocks(COMMAND_LINE, "") if block.startswith("$ ")).splitlines()
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


@pytest.mark.docs
def test_examples_in_docstrings_run(fork_server: None) -> None:
    results = {module: doctest.testmod(importlib.import_module(module)) for module in MODULES}
    assert not [module for module, result in results.items() if result.failed]
    assert sum(result.attempted for result in results.values()) > 20


def test_every_public_name_has_an_example() -> None:
    things = [(name, getattr(stratagem, name)) for name in stratagem.__all__ if name != "__version__"]
    told = [(name, inspect.getdoc(thing) or "") for name, thing in things if not inspect.ismodule(thing)]
    errors = {"OutOfMemoryError", "StratagemError"}
    assert not [name for name, docstring in told if ">>> " not in docstring and name not in errors]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    paths = [ROOT / path for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]*)`", text)]
    assert not [path for path in links + paths if not path.exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_documents_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":  # tells of names that are gone
        return
    for name in sorted(set(re.findall(r"\bsg\.([A-Za-z_][\w.]*\w)", document.read_text()))):
        thing: object = stratagem
        for part in name.split("."):
            thing = getattr(thing, part)


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_code_of_documents_compiles(document: Path) -> None:
    for block in documents.blocks_of(document.read_text()):
        compile(block.code, f"{document.name}, line {block.line}", "exec")


def test_blocks_are_run_in_order_and_programs_apart() -> None:
    page = """
```python
a = 1
```
text
<!-- not run: needs a cluster -->
```python
b = 2
```
```py
c = 3
```
```{note}
no code
```
```python
d = 4
```
<!-- new program -->
```python
e = 5
```
"""
    first, second = documents.programs_of(page)
    assert (first.split(), second.split()) == (["a", "=", "1", "d", "=", "4"], ["e", "=", "5"])
    assert first.splitlines()[2] == "a = 1", "a line of the program has the number that it has in the page"
    assert [block.code for block in documents.blocks_of(page) if not block.is_run] == ["b = 2\n", "c = 3\n"]


def test_readme_is_short() -> None:
    words = re.sub(r"[|`*#:\-]", " ", (ROOT / "README.md").read_text()).split()
    assert len(words) <= 800


def test_changelog_has_one_line_for_each_entry_under_four_headings() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [number for number, line in enumerate(lines) if line.startswith("## ")]
    assert releases
    entries = [line for line in lines[releases[0] :] if line.startswith((" ", "-"))]
    assert not [line for line in entries if not line.startswith("- ") or len(line) > 165]
    headings = {line.removeprefix("### ") for line in lines if line.startswith("### ")}
    assert headings <= {"Added", "Changed", "Removed", "Fixed"}


def test_release_notes_are_those_of_this_version() -> None:
    notes = (ROOT / "docs/release_notes.md").read_text()
    assert re.findall(r"^## (\S+)$", notes, re.MULTILINE)[0] == stratagem.__version__


def test_reference_has_every_public_name() -> None:
    listed = {
        f"{module}.{name}"
        for page in ROOT.glob("docs/reference/*.md")
        for module, names in re.findall(r"currentmodule:: (\S+)\n(.*?)```", page.read_text(), re.DOTALL)
        for name in re.findall(r"^ {3}(\w+)$", names, re.MULTILINE)
    }
    shown = {stratagem_name(name) for name in listed}
    missing = {id(thing): name for name, thing in public_things() if id(thing) not in shown}
    assert not missing, "write these names into a page of docs/reference"


def stratagem_name(path: str) -> int:
    """Which thing a name of the reference stands for."""
    module, _, name = path.rpartition(".")
    return id(getattr(importlib.import_module(module), name))


def public_things() -> list[tuple[str, object]]:
    """What users find in stratagem and its public modules; errors have a page that lists them all."""
    things = []
    for module in (stratagem, *(getattr(stratagem, name) for name in stratagem._MODULES if name != "errors")):
        for name in module.__all__:
            thing = getattr(module, name)
            is_error = inspect.isclass(thing) and issubclass(thing, stratagem.errors.StratagemError)
            if not (inspect.ismodule(thing) or is_error or name == "__version__"):
                things.append((f"{module.__name__}.{name}", thing))
    return things


def test_reference_has_every_environment_variable() -> None:
    page = (ROOT / "docs/reference/environment_variables.md").read_text()
    assert not [name for name in (*_env._OWN, *_env.KUBERNETES, _env.TF_CONFIG, _env.RAY_ADDRESS) if name not in page]


def test_decisions_have_an_index() -> None:
    index = (ROOT / "docs/decisions/index.md").read_text()
    rows = re.findall(r"^\| (\d{4}) \| \[[^]]+\]\((\S+\.md)\) \| `\d{4}-\d\d-\d\d` \| \S.* \|$", index, re.MULTILINE)
    files = sorted(file.name for file in ROOT.glob("docs/decisions/0*.md"))
    assert [name for _, name in rows] == files
    assert [number for number, _ in rows] == [name[:4] for name in files]


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_picture_is_what_the_script_draws(name: str) -> None:
    assert (draw_pictures.IMAGES / f"{name}.svg").read_text() == draw_pictures.PICTURES[name]().svg()


def test_site_has_no_dead_links_unseen(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top"></h1><a href="sub/page.html#here">x</a><a href="#top">y</a>')
    page = (
        '<a id="here"></a><a href="../index.html#gone">a</a><img src="none.png"><a href="https://example.org/x">b</a>'
    )
    (tmp_path / "sub" / "page.html").write_text(page)
    assert make_site.dead_links(tmp_path) == ["sub/page.html: ../index.html#gone", "sub/page.html: none.png"]


def test_site_leads_links_of_other_files_to_its_pages() -> None:
    page = make_site.with_links_from_docs(ROOT / "examples" / "README.md")
    assert "](notebooks/gpu_1.ipynb)" in page
    assert "](../examples/demo.py)" in page
    assert "](architecture.md" in make_site.with_links_from_docs(ROOT / "README.md")


def test_site_leads_links_of_its_pages_to_pages_not_to_files() -> None:
    text = "[a](../../CHANGELOG.md) [b](../../LICENSE) [c](../../examples/README.md#demo)"
    assert make_site.with_links_to_pages(text, Path("start")) == (
        "[a](../changelog.md) [b](../../LICENSE) [c](../examples.md#demo)"
    )


def test_site_gathers_notebooks_without_touching_the_source(tmp_path: Path) -> None:
    pages = make_site.gather(tmp_path / "tree")
    assert (pages / "index.md").read_text() == (ROOT / "docs/index.md").read_text()
    assert list((pages / "notebooks").glob("*.ipynb"))
    assert not (ROOT / "docs" / "notebooks").exists()
