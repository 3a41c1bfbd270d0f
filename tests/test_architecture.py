"""Holds the arrows between the folders, by reading the source without importing it."""

import ast
import collections
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stratagem"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

# A folder may import from itself and from those before it.
LAYERS = (
    *("devices", "placement", "cluster", "processes", "objects", "collectives", "variables", "parameters", "engine"),
    *("inputs", "strategies", "training", "tools", "cli"),
)
APART = {"graphs": ("devices", "placement", "cluster")}  # which nothing imports
BASE = {
    *("errors", "_env", "_caller", "_checks", "_clock", "_dtypes", "_integrations", "_parallel_wrappers"),
    *("_tensorflow_names", "_torch"),
    *("_tree", "_turns"),
}
# The public face: may show anything, and nothing inside may look back at it.
FACE = {"__init__", "__main__", "config", "estimator", "metrics"}

FORBIDDEN = (
    "pickle",
    "recv_pyobj",
    "send_pyobj",
    "torch.load(",
    "distributed.rpc",
    "_object(",
    "tcp://*",
    "0.0.0.0",
    "shelve",
    "marshal",
)


def relative(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def part_of(file: Path) -> str:
    """The folder of a file, or its own name where it lies at the top."""
    inside = file.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_parts(tree: ast.AST) -> Iterator[str]:
    """The folders and top files of stratagem that a file imports from, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            head, _, rest = module.partition(".")
            if head == "stratagem":
                yield rest.split(".")[0]


def may_import(part: str, other: str) -> bool:
    if part in FACE:
        return True
    if other in BASE or (other == "__version__" and part in ("cli", "cluster")):
        return True
    if part in APART:
        return other in (part, *APART[part])
    return part in LAYERS and other in LAYERS[: LAYERS.index(part) + 1]


def found_in(look: Callable[[Path, ast.Module], Iterable[object]]) -> dict[str, list[object]]:
    """What is wrong in each file, by its name; files where nothing is are left out."""
    found = {relative(file): list(look(file, tree)) for file, tree in TREES.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_imports_go_one_way() -> None:
    def wrong(file: Path, tree: ast.Module) -> Iterable[object]:
        return (other for other in imported_parts(tree) if not may_import(part_of(file), other))

    assert not found_in(wrong)


def test_every_folder_is_a_layer() -> None:
    assert {part_of(file) for file in FILES} <= {*LAYERS, *APART, *BASE, *FACE}


def test_only_one_file_reads_the_environment() -> None:
    def lines(file: Path, tree: ast.Module) -> Iterable[object]:
        return (
            node.lineno
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
            or (isinstance(node, ast.ImportFrom) and node.module == "os")
        )

    assert set(found_in(lines)) == {"_env.py"}


PRIVATE_NAMES_OF_TORCH = frozenset(  # that objects of torch have, so that nothing in an expression says torch
    """
    _allgather_base _base _buffers _cdata _check_input_dim _current_autograd_node _devices _expr _forward_hooks
    _forward_pre_hooks _is_view _modules _opt_called _optimizer_step_post_hooks _optimizer_step_pre_hooks _overloadname
    _parameters _post_accumulate_grad_hooks _schema _sequence_nr _set_default_timeout _timeout _values _version
    _wrapped_by_lr_sched
    """.split()
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def roots_in_torch(tree: ast.AST) -> set[str]:
    """The names that stand for torch, its modules or what is in them."""
    roots = {"torch", "_c10d"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {each.asname for each in node.names if each.asname and each.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            roots |= {each.asname or each.name for each in node.names}
    return roots


def private_uses_of_torch(tree: ast.AST) -> Iterator[str]:
    """What a file imports, reads or writes of torch that torch calls private; operations have names, not privacy."""
    roots = roots_in_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            inside = node.value
            while isinstance(inside, ast.Attribute | ast.Call):
                inside = inside.value if isinstance(inside, ast.Attribute) else inside.func
            root = inside.id if isinstance(inside, ast.Name) else ""
            own = isinstance(node.value, ast.Name) and root in ("self", "cls")
            known = node.attr in PRIVATE_NAMES_OF_TORCH and not own
            if (root in roots and not ast.unparse(node).startswith("torch.ops.")) or known:
                yield f"line {node.lineno}: {ast.unparse(node)}"
            continue
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_NAMES_OF_TORCH:
            yield f"line {node.lineno}: {node.value!r}"
            continue
        else:
            continue
        for path in paths:
            if path.split(".")[0] == "torch" and any(map(is_private, path.split("."))):
                yield f"line {node.lineno}: {path}"


def test_one_folder_and_one_file_know_private_names_of_torch() -> None:
    found = found_in(lambda file, tree: () if part_of(file) in ("_torch", "_tree") else private_uses_of_torch(tree))
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._C import _len_torch_function_stack",
        "from torch.utils import _pytree as pytree",
        "torch._foreach_zero_(sums)",
        "torch.utils._pytree.tree_map(f, x)",
        "from torch.nn import functional as F; F._threshold(x)",
        "parameter._version != 3",
        "self._own[0]._version",
        "own._opt_called = True",
        "getattr(module, '_buffers')",
        "value.untyped_storage()._cdata",
    ],
)
def test_private_names_of_torch_are_seen(line: str) -> None:
    assert list(private_uses_of_torch(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["torch.__version__", "self._buffers = []", "torch.ops.aten._to_copy", "held._tensors"]
)
def test_other_names_are_not_taken_for_private_ones_of_torch(line: str) -> None:
    assert not list(private_uses_of_torch(ast.parse(line)))


def test_imports_do_not_hide_in_functions() -> None:
    def lines(file: Path, tree: ast.Module) -> Iterable[object]:
        return (
            node.lineno
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and part_of(file) != "cli"
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        )

    assert not found_in(lines)


def test_training_asks_the_engine_and_does_not_look_into_it() -> None:
    """What runs, and what is open, is asked of `ReplicaContext` and of functions: the lists are the engine's own."""
    tree = TREES[SOURCE / "engine" / "context.py"]
    assigned = (
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    lists = {target.id for target in assigned if isinstance(target, ast.Name)}
    assert {"state", "current_runs", "open_runtimes"} <= lists

    def uses(file: Path, tree: ast.Module) -> Iterable[object]:
        for node in ast.walk(tree) if part_of(file) == "training" else ():
            used: set[str] = set()
            if isinstance(node, ast.ImportFrom) and node.module == "stratagem.engine.context":
                used = {each.name for each in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "context":
                used = {node.attr}
            yield from (f"line {node.lineno}: {name}" for name in used & lists)

    assert not found_in(uses)


def test_every_file_says_what_it_owns() -> None:
    assert not [relative(file) for file, tree in TREES.items() if not ast.get_docstring(tree)]


def test_names_of_files_and_classes_stand_for_one_thing() -> None:
    # The public faces are named like the folders that they show.
    stems = collections.Counter(file.stem for file in FILES if file.stem != "__init__" and part_of(file) not in FACE)
    assert not [stem for stem, count in stems.items() if count > 1]
    made = (node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    classes = collections.Counter(made)
    assert not [name for name, count in classes.items() if count > 1]


def test_no_folder_has_more_than_20_files() -> None:
    counts = collections.Counter(file.parent for file in FILES if file.stem != "__init__")
    assert not {relative(folder): count for folder, count in counts.items() if count > 20}


def test_source_is_free_of_what_attackers_look_for() -> None:
    def words(file: Path, _: ast.Module) -> Iterable[object]:
        # Between a controller and its own children, over the pipe that each inherited, objects may travel.
        allowed = {"pickle"} if relative(file) == "processes/packing.py" else set()
        text = file.read_text()
        return (word for word in FORBIDDEN if word in text and word not in allowed)

    assert not found_in(words)


def test_type_checkers_see_the_same_names_as_users() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    import stratagem

    assert shown == set(stratagem.__all__) - {"__version__"}
