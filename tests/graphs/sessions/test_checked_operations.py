"""Arguments that do not fit together, for kernels of torch that would read or write beyond their tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import stratagem as sg
from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.errors import SessionError
from stratagem.graphs.sessions.checked_operations import _RULES, checked

FAR = 2**40


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def indices(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value)


ATTENTION = (ones(1, 2, 8, 4), ones(1, 2, 8, 4), ones(1, 2, 8, 4))
LIES: dict[str, tuple[Any, ...]] = {
    "max_pool2d_with_indices_backward": (
        *(ones(1, 1, 2, 2), ones(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False),
        indices(FAR, 1, 1, 2, 2),
    ),
    "max_pool3d_with_indices_backward": (
        *(ones(1, 1, 2, 2, 2), ones(1, 1, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
        indices(-1, 1, 1, 2, 2, 2),
    ),
    "adaptive_max_pool2d_backward": (ones(1, 1, 2, 2), ones(1, 1, 4, 4), indices(16, 1, 1, 2, 2)),
    "adaptive_max_pool3d_backward": (ones(1, 1, 2, 2, 2), ones(1, 9, 4, 4, 4), indices(0, 1, 1, 2, 2, 2)),
    "_adaptive_avg_pool2d_backward": (ones(1, 1, 2, 2), ones(50, 50, 4, 4)),
    "_adaptive_avg_pool3d_backward": (ones(1, 1, 2, 2, 2), ones(50, 50, 4, 4, 4)),
    "embedding_dense_backward": (ones(2, 3), indices(FAR, 2), 4, -1, True),
    "nll_loss_backward": (ones(4), ones(4, 3), indices(FAR, 4), None, 0, -100, torch.tensor(1.0)),
    "nll_loss2d_backward": (ones(1, 2, 2), ones(1, 3, 2, 2), indices(3, 1, 2, 2), None, 0, -100, torch.tensor(1.0)),
    "native_batch_norm": (ones(2, 9), None, None, ones(1), ones(1), True, 0.1, 1e-5),
    "native_batch_norm_backward": (
        *(ones(2, 9), ones(2, 9), None, None, None, ones(1), ones(1)),
        *(True, 1e-5, [True] * 3),
    ),
    "_native_batch_norm_legit_functional": (ones(2, 9), ones(1), ones(1), ones(9), ones(9), True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": (ones(2, 9), None, None, ones(1), ones(9), 0.1, 1e-5),
    "native_layer_norm_backward": (
        *(ones(9, 2), ones(9, 2), [2], ones(1, 1), ones(9, 1)),
        *(None, None, [True] * 3),
    ),
    "grid_sampler_2d_backward": (ones(1, 1, 1, 1), ones(1, 3, 9, 9), ones(1, 9, 9, 2), 0, 0, False, [True] * 2),
    "reflection_pad1d_backward": (ones(1, 1, 6), ones(3, 3, 4), [1, 1]),
    "reflection_pad2d_backward": (ones(1, 1, 6, 6), ones(3, 3, 4, 4), [1] * 4),
    "replication_pad1d_backward": (ones(1, 1, 6), ones(3, 3, 4), [1, 1]),
    "replication_pad2d_backward": (ones(1, 1, 6, 6), ones(3, 3, 4, 4), [1] * 4),
    "unfold_backward": (ones(5, 1), [100], 0, 50, 1),
    "_cdist_backward": (ones(3, 3), ones(3, 5), ones(3, 5), 2.0, ones(1)),
    "_log_softmax_backward_data": (ones(100), ones(1), 0, torch.float32),
    "_scaled_dot_product_flash_attention_for_cpu": (*ATTENTION[:2], ones(1, 2, 1, 4)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        *(ones(1, 2, 8, 4), *ATTENTION, ones(1, 2, 8, 4), ones(1, 1, 1)),
        *(0.0, False),
    ),
    "upsample_bilinear2d": (ones(1, 1, 4, 4), [9, 9], False, 1e-300, None),
    "upsample_bilinear2d_backward": (ones(1, 1, 9, 9), [9, 9], [1, 1, 4, 4], False, float("nan"), None),
    "upsample_nearest1d": (ones(1, 1, 4), [9], 1e-300),
    "upsample_nearest1d_backward": (ones(1, 1, 9), [9], [1, 1, 4], 1e-300),
    "upsample_nearest2d": (ones(1, 1, 4, 4), [9, 9], None, 1e-300),
    "upsample_nearest2d_backward": (ones(1, 1, 9, 9), [9, 9], [1, 1, 4, 4], None, 1e-300),
}


@pytest.mark.parametrize("name", sorted(_RULES))
def test_arguments_that_lie_are_refused_before_the_kernel_runs(name: str) -> None:
    with pytest.raises(SessionError):
        checked(getattr(torch.ops.aten, name).default)(*LIES[name])


class Checking(TorchDispatchMode):
    """Runs every operation as a task does for another, and notes which have rules."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return checked(func)(*args, **(kwargs or {}))


def pooled(pool: nn.Module, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: pool(torch.randn(shape, requires_grad=True)).sum()


def norm_of(norm: nn.Module, *shape: int) -> Callable[[], torch.Tensor]:
    return lambda: norm(torch.randn(shape, requires_grad=True)).square().sum()


HONEST: list[Callable[[], torch.Tensor]] = [
    pooled(nn.MaxPool2d(2, padding=1, ceil_mode=True), 2, 3, 7, 5),
    pooled(nn.MaxPool2d(2), 3, 4, 4),
    pooled(nn.MaxPool3d(2, dilation=2), 2, 3, 7, 5, 6),
    pooled(nn.AdaptiveMaxPool2d((3, 2)), 2, 3, 7, 5),
    pooled(nn.AdaptiveMaxPool3d(2), 3, 7, 5, 6),
    pooled(nn.AdaptiveAvgPool2d((3, 2)), 2, 3, 7, 5),
    pooled(nn.AdaptiveAvgPool3d(2), 2, 3, 7, 5, 6),
    pooled(nn.ReflectionPad1d(2), 3, 7),
    pooled(nn.ReflectionPad2d((1, 2, 0, 1)), 2, 3, 7, 5),
    pooled(nn.ReplicationPad1d((2, 0)), 2, 3, 7),
    pooled(nn.ReplicationPad2d(-1), 3, 7, 5),
    pooled(nn.Upsample(scale_factor=1.7), 2, 3, 7),
    pooled(nn.Upsample(scale_factor=0.4), 2, 3, 7, 9),
    pooled(nn.Upsample(scale_factor=(1.3, 2.6), mode="bilinear"), 2, 3, 7, 9),
    pooled(nn.Upsample(size=(3, 20), mode="bilinear", align_corners=True), 2, 3, 7, 9),
    lambda: nn.Embedding(5, 3, padding_idx=-1, scale_grad_by_freq=True)(torch.tensor([[0, 4], [4, 2]])).sum(),
    lambda: F.nll_loss(torch.randn(4, 3, requires_grad=True), torch.tensor([0, -100, 2, 1]), reduction="none").sum(),
    lambda: F.nll_loss(torch.randn(3, requires_grad=True), torch.tensor(1), torch.rand(3)),
    lambda: F.cross_entropy(torch.randn(2, 3, 4, 5, requires_grad=True), torch.randint(3, (2, 4, 5)), ignore_index=1),
    norm_of(nn.BatchNorm1d(3), 4, 3),
    norm_of(nn.BatchNorm2d(3, affine=False), 4, 3, 5, 5),
    norm_of(nn.BatchNorm2d(3).eval(), 4, 3, 5, 5),
    norm_of(nn.BatchNorm3d(3, track_running_stats=False), 4, 3, 2, 2, 2),
    norm_of(nn.LayerNorm([5, 6]), 4, 3, 5, 6),
    norm_of(nn.LayerNorm([6], elementwise_affine=False), 6),
    lambda: F.grid_sample(
        torch.randn(2, 3, 5, 6, requires_grad=True), torch.rand(2, 4, 7, 2), align_corners=False
    ).sum(),
    lambda: torch.randn(3, 9, requires_grad=True).unfold(1, 4, 2).sum(),
    lambda: torch.cdist(torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4), p=1.0).sum(),
    lambda: F.log_softmax(torch.randn(3, 4, requires_grad=True), 1).sum(),
    lambda: F.scaled_dot_product_attention(
        torch.randn(2, 3, 7, 4, requires_grad=True), *torch.randn(2, 2, 3, 5, 4)
    ).sum(),
]


def test_what_torch_asks_for_itself_is_not_refused() -> None:
    torch.manual_seed(0)
    with Checking() as mode:
        for make in HONEST:
            make().backward()
    functional = {"_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"}
    assert _RULES.keys() - mode.seen <= functional, "an operation with a rule that is not shown to work"


def test_session_refuses_indices_out_of_range_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With such an index the kernel writes into memory of the task that is not the tensor's."""
    tokens.create(tmp_path / "own" / "token")
    monkeypatch.setenv(_env.TOKEN_FILE, str(tmp_path / "own" / "token"))
    with sg.Graph() as graph:
        places = sg.placeholder(torch.int64, [1, 1, 2, 2])
        rest = LIES["max_pool2d_with_indices_backward"][2:-1]
        gradient, image = (sg.constant(each) for each in LIES["max_pool2d_with_indices_backward"][:2])
        found = torch.ops.aten.max_pool2d_with_indices_backward(gradient, image, *rest, places)
    with sg.Server.create_local_server() as server, sg.Session(server.target, graph) as session:
        with pytest.raises(SessionError, match=f"indices must be from 0 to 15, and are from {FAR} to {FAR}"):
            session.run(found, {places: indices(FAR, 1, 1, 2, 2)})
        assert session.run(found, {places: indices(3, 1, 1, 2, 2)}).sum() == 4
