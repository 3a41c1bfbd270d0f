from tests.keras_own.__main__ import Outcome, compare

PASSED, FAILED = Outcome(True, ""), Outcome(False, "E   wrong")
REASONS = {"a.py::test_*_jit": "compiles", "b.py::*": "old"}


def test_tests_that_differ_need_a_reason_and_reasons_need_a_test() -> None:
    plain = {"a.py::test_x": PASSED, "a.py::test_y_jit": PASSED, "a.py::test_z": PASSED, "c.py": FAILED}
    found = compare(plain, {**plain, "a.py::test_y_jit": FAILED, "a.py::test_z": FAILED}, REASONS)
    assert (found.plain, found.same, found.explained) == (3, 1, {"compiles": 1})
    assert found.unexplained == {"a.py::test_z": "E   wrong"}
    assert found.stale == ["b.py::*"]


def test_a_test_that_was_not_run_in_the_scope_differs() -> None:
    assert list(compare({"a.py::test_x": PASSED}, {}, {}).unexplained) == ["a.py::test_x"]
