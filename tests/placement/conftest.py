"""What tests of placement get: simulated GPUs, and a check that torch is as before."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import _len_torch_function_stack

import stratagem as sg
from stratagem.devices.inventory import Inventory
from stratagem.placement import resolution, scopes
from tests.contracts.strategies_under_test import STRICT

IS_STRICT = STRICT in os.environ
"""Whether this is the program in which these tests run on strict devices: `tests/contracts/test_strict_devices.py`."""

# Left out there, by nature. To torch, simulated GPUs are the CPU, where a program may say `device="cpu"` and use a
# generator of the host; limits of accelerators are held by their allocator, in its words. Strict devices have no
# sparse kernels. Keras moves what its layers are given to the one device that it has chosen.
_NOT_STRICT = {
    *("test_moves_that_the_program_asks_for", "test_scope_lives_together_with_torchs_own_device_contexts"),
    *("test_training_inside_a_scope_equals_plain_torch", "test_parts_move_and_the_longest_name_wins"),
    "test_model_of_another_device_in_a_scope_keeps_its_weights_and_statistics_there",
    *("test_recurrent_sparse_and_recomputed_operations_are_placed", "test_lines_have_the_form_of_tensorflow"),
    *("test_gradients_count_where_their_parameters_are", "test_copy_and_module_that_do_not_fit_are_refused"),
    *("test_going_over_the_limit_names_tensor_size_limit_and_residents", "test_layers_of_keras_are_known_by_name"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [each for each in items if IS_STRICT and each.name.partition("[")[0] in _NOT_STRICT]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [each for each in items if each not in left_out]


@pytest.fixture
def gpus(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four simulated GPUs of 64 MiB; afterwards nothing of placement may be left in torch."""
    torch.manual_seed(0)
    monkeypatch.setattr(resolution, "_told", set())
    inventory.simulate("GPU", 4, memory_limit=64, strict=IS_STRICT)
    yield
    sg.config.set_soft_device_placement(False)
    assert not sg.config.get_log_device_placement()
    gc.collect()
    assert not scopes.state.open
    assert _len_torch_function_stack() == 0
    inventory.simulate("GPU", 1, strict=IS_STRICT)  # the configuration is free again


def where(tensor: torch.Tensor) -> str:
    """The short name of the device that a tensor is on."""
    return sg.device_of(tensor).name.removeprefix("/device:")


def two_products(*devices: str) -> tuple[sg.Graph, torch.Tensor]:
    """The program of the notes: the same product on two devices, summed on the CPU; its graph, and the sum."""
    with sg.Graph() as graph:
        products = []
        for device in devices:
            with sg.device(device):
                a = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
                b = sg.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])
                products.append(torch.matmul(a, b))
        with sg.device("/cpu:0"):
            total = sg.add_n(products)
    return graph, total
