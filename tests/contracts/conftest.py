"""Leaves out what cannot be equal by nature, row by row."""

import pytest

from tests.contracts.strategies_under_test import LOCAL

# Replicas of local SGD take their own gradients. The mean of their weights is that of one device only where an update
# is linear in its gradient, keeps no state, and every replica has rows.
_NEEDS_GLOBAL_GRADIENTS = (
    *("test_closure_optimizer", "test_parameter_groups", "test_clipping", "test_gradients_of_several_passes"),
    *("test_gradient_scaler", "test_shared_frozen", "test_parameters_changed_in_place", "test_update_by_hand"),
    *(
        "test_two_dtypes",
        "test_state_dicts_are_whole",
        "test_state_of_an_optimizer",
        "test_parameter_that_is_one_number",
    ),
    *("test_train_evaluate_and_predict", "test_resumed_training", "test_loop_that_is_resumed"),
    *("test_fit_with_adam", "test_whole_updates", "test_synchronized_statistics"),
)
_LINEAR = ("sgd", "SGD")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _differs_by_nature(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _differs_by_nature(item: pytest.Item) -> bool:
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if parameters.pop("strategy", None) not in LOCAL:
        return False
    optimizer = next((each for each in parameters.values() if isinstance(each, str)), None)
    return item.name.startswith(_NEEDS_GLOBAL_GRADIENTS) or optimizer not in (None, *_LINEAR)
