"""What surrounds a run in the main program holds in every replica."""

import contextlib
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg


@contextlib.contextmanager
def set_for_all(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def set_precision(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision


ENGINE = torch.backends.quantized.engine
OTHER_ENGINE = next(each for each in torch.backends.quantized.supported_engines if each not in (ENGINE, "none"))

SURROUNDINGS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], Callable[[], Any]]] = {
    "no gradients": (torch.no_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: (
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")),
            torch.is_autocast_cache_enabled(),
        ),
    ),
    "dtype": (
        lambda: set_for_all(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: str(torch.get_default_dtype()),
    ),
    "deterministic": (
        lambda: set_for_all(torch.use_deterministic_algorithms, True, False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "precision": (
        lambda: set_for_all(torch.set_float32_matmul_precision, "medium", "highest"),
        torch.get_float32_matmul_precision,
    ),
    "newer precision": (
        lambda: set_for_all(set_precision, "bf16", "ieee"),
        lambda: torch.backends.mkldnn.matmul.fp32_precision == "bf16",
    ),
    "kernels": (
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True),
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    ),
    "attention": (
        lambda: set_for_all(torch.backends.cuda.enable_flash_sdp, False, True),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "attention in modules": (
        lambda: set_for_all(torch.backends.mha.set_fastpath_enabled, False, True),
        torch.backends.mha.get_fastpath_enabled,
    ),
    "engine of quantized products": (
        lambda: set_for_all(functools.partial(setattr, torch.backends.quantized, "engine"), OTHER_ENGINE, ENGINE),
        lambda: torch.backends.quantized.engine,
    ),
    "checks of sparse tensors": (
        torch.sparse.check_sparse_tensor_invariants,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    "uninitialized memory": (
        lambda: set_for_all(
            functools.partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory"), False, True
        ),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "denormal": (
        lambda: set_for_all(torch.set_flush_denormal, True, False),
        lambda: bool(torch.tensor(3e-308, dtype=torch.float64) / 2 == 0),
    ),
    "arguments": (
        lambda: set_for_all(functools.partial(setattr, sys, "argv"), ["train.py", "--epochs=2"], sys.argv),
        lambda: list(sys.argv),
    ),
    "recursion": (lambda: set_for_all(sys.setrecursionlimit, 5000, sys.getrecursionlimit()), sys.getrecursionlimit),
    "folder": (lambda: contextlib.chdir("/"), os.getcwd),
}


@pytest.mark.parametrize(("surround", "look"), SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_replicas_are_surrounded_as_the_program_is(
    strategy: sg.MirroredStrategy, surround: Callable[[], contextlib.AbstractContextManager[Any]], look: Any
) -> None:
    before = look()
    assert strategy.local_results(strategy.run(look)) == (before, before)
    with surround():
        inside = look()
        assert inside != before
        assert strategy.local_results(strategy.run(look)) == (inside, inside)
    assert strategy.local_results(strategy.run(look)) == (before, before)


def test_folder_that_is_gone_is_no_obstacle(strategy: sg.MirroredStrategy, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with contextlib.ExitStack() as back:
        back.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        folder.rmdir()
        assert strategy.run(lambda: 1).values == (1, 1)


def test_filters_of_a_library_that_a_replica_loads_later_hold_from_then_on(
    strategy: sg.MirroredStrategy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "late_library.py").write_text("class Careful(UserWarning):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = importlib.import_module("late_library")

    def warned() -> str:
        late = importlib.import_module("late_library")
        try:
            warnings.warn("now", late.Careful, stacklevel=1)
        except late.Careful:
            return "raised"
        return "warned"

    def load() -> None:
        sys.path.insert(0, str(tmp_path))
        importlib.import_module("late_library")
        del sys.path[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error", late.Careful)
        strategy.run(load)
        assert strategy.local_results(strategy.run(warned)) == ("raised", "raised")
    monkeypatch.delitem(sys.modules, "late_library")


def test_filter_of_a_category_that_replicas_do_not_have_is_no_obstacle(strategy: sg.MirroredStrategy) -> None:
    unknown = type("NotThere", (UserWarning,), {"__module__": "numpy"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", unknown)
        warnings.simplefilter("error", BytesWarning)

        def is_raised() -> bool:
            try:
                warnings.warn("now", BytesWarning, stacklevel=1)
            except BytesWarning:
                return True
            return False

        assert strategy.local_results(strategy.run(is_raised)) == (True, True)


def test_what_is_made_under_inference_mode_can_be_trained(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"]) as strategy:
        model = nn.Linear(2, 1)
        strategy.adopt(model)
        with torch.inference_mode():
            assert len(strategy.run(lambda: model(torch.ones(2))).values) == 2
        with strategy.scope():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()

        before = model.weight.detach().clone()
        strategy.run(step)
        torch.testing.assert_close(model.weight.detach(), before - 0.5)
        assert strategy.run(lambda: model.weight.sum().item()).values == (model.weight.sum().item(),) * 2


def test_weights_written_after_the_last_update_are_not_taken_for_a_wait_in_vain(four_cpus: None) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], stall_timeout_s=20.0) as strategy:
        with strategy.scope():
            # So large that one replica waits for more than a slice while another publishes.
            model = nn.Linear(8000, 5000, bias=False).requires_grad_(False)

        def write() -> None:
            model.weight.fill_(2)

        for _ in range(2):
            strategy.run(write)
        assert strategy.run(lambda: float(model.weight[-1, -1])).values == (2, 2)


@pytest.mark.parametrize("way", ["shared_memory", "to_one"])
def test_results_that_share_memory_with_weights_do_not_change_later(four_cpus: None, way: str) -> None:
    with sg.MirroredStrategy(["cpu:2", "cpu:3"], cross_device_ops=way) as strategy:
        with strategy.scope():
            model = nn.Linear(256, 256, bias=False)

        def look() -> tuple[Any, ...]:
            weight = model.weight
            return weight, weight.t(), weight.data, weight.detach()[1:], weight.detach().numpy()

        results = strategy.run(look)
        weight = model.weight.detach().clone()
        expected = weight, weight.t(), weight, weight[1:], weight
        with torch.no_grad():
            model.weight.zero_()
        strategy.run(lambda: model.weight.sum().item())
        for replica in strategy.local_results(results):
            for each, before in zip(replica, expected, strict=True):
                assert torch.equal(torch.as_tensor(each), before)
