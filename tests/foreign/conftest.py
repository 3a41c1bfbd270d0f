"""One strategy for all programs of a table: most cost milliseconds then."""

from collections.abc import Iterator

import pytest

import stratagem as sg
from tests.contracts.strategies_under_test import opened_row
from tests.foreign.programs import LIKE, ROWS, SPARSE, Program


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", list(ROWS), indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        program, row = parameters.get("program"), parameters.get("row")
        if not isinstance(program, Program):
            continue
        if row in program.without or (row in LIKE and program.name in SPARSE):
            left_out.add(item)
        if row in program.seldom:
            item.add_marker(pytest.mark.soak)
        if row in program.known:
            item.add_marker(pytest.mark.xfail(reason=program.known[row], strict=True))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def row(
    request: pytest.FixtureRequest, four_cpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sg.Strategy]:
    """The strategy of a row, for all programs of a file."""
    with opened_row(ROWS[request.param], request, tmp_path_factory.mktemp("row")) as made:
        yield made
