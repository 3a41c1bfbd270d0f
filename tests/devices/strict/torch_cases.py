"""What torch's programs do on a GPU, on strict devices; see `in_a_program`."""

import copy
import gc
import io
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.devices.serving import serve
from stratagem.devices.strict.counts import counted

NUM_GPUS = 4
LIMIT = 64  # MiB
GPU = "gpu:1"


def prepare() -> None:
    sg.config.simulate_devices("GPU", NUM_GPUS, memory_limit=LIMIT, strict=True)
    torch.set_num_threads(1)


def finish() -> None:
    """Nothing is open."""


# Where tensors are


def case_tensor_is_plain_and_on_its_device() -> None:
    tensor = torch.ones(2, 3, device=GPU)
    assert type(tensor) is torch.Tensor
    assert tensor.device == torch.device("gpu", 1)
    assert tensor.is_gpu
    assert not tensor.is_cpu
    assert tensor.untyped_storage().device == tensor.device
    assert "device='gpu:1'" in repr(tensor)


def case_tensor_moves_when_asked_to() -> None:
    host = torch.arange(6.0).view(2, 3)
    there = host.to(GPU)
    assert there.device.index == 1
    assert there.to(GPU) is there
    for back in (there.cpu(), there.to("cpu"), there.to(torch.device("cpu")), there.gpu(2).to("gpu:3").cpu()):
        assert back.device.type == "cpu"
        assert torch.equal(back, host)


def case_conjugates_and_negatives_are_computed_when_they_are_read() -> None:
    host = torch.tensor([1 + 2j, 3 - 4j])
    for compute in (
        lambda x: x.conj() * 2,
        lambda x: x.conj().clone(),
        lambda x: x.conj(),
        lambda x: x.conj().sum(),
        lambda x: x.conj().imag + 1,
        lambda x: (x * x.conj()).real,
        lambda x: x[None].mH @ x[None],
    ):
        torch.testing.assert_close(compute(host.to(GPU)).cpu(), compute(host))


def case_two_devices_do_not_mix() -> None:
    here, there, other = torch.ones(2, 2), torch.ones(2, 2, device=GPU), torch.ones(2, 2, device="gpu:0")
    for call in (
        lambda: there + here,
        lambda: here + there,
        lambda: there @ here,
        lambda: there + other,
        lambda: torch.cat([there, other]),
        lambda: there.add_(here),
        lambda: nn.functional.linear(there, here),
        lambda: nn.Embedding(3, 2, device=GPU)(torch.tensor([1])),
        lambda: nn.Linear(2, 2)(there),
        lambda: nn.functional.cross_entropy(there, torch.tensor([0, 1])),
    ):
        with pytest.raises(
            RuntimeError, match=r"Expected all tensors to be on the same device.* tensor\.to\(strategy\.device\)"
        ):
            call()


def case_scalars_and_indices_of_the_host_mix_as_on_a_gpu() -> None:
    there = torch.arange(5.0, device=GPU)
    assert (there + torch.tensor(1.0)).tolist() == [1, 2, 3, 4, 5]
    assert there[torch.tensor([1, 2])].tolist() == [1, 2]
    there[torch.tensor([0, 1])] = 9.0
    there[there > 8] = 7.0
    assert there.tolist() == [7, 7, 2, 3, 4]


def case_numpy_wants_a_copy() -> None:
    with pytest.raises(TypeError, match="can't convert gpu:1 device type tensor to numpy"):
        torch.ones(2, device=GPU).numpy()


def case_device_that_does_not_exist_is_refused() -> None:
    for call in (lambda: torch.ones(2, device="gpu:7"), lambda: torch.ones(2).to("gpu:7")):
        with pytest.raises(RuntimeError, match="gpu:7 does not exist, there are 4 strict GPUs"):
            call()


def case_device_without_a_number_is_the_current_one() -> None:
    torch.accelerator.set_device_index(2)
    try:
        made = [
            *(torch.ones(2).to("gpu"), torch.empty(2, device="gpu"), torch.tensor([1], device="gpu")),
            *(torch.ones(2).gpu(), torch.as_tensor([1], device="gpu"), torch.ones(2).to(torch.device("gpu"))),
            *(nn.Linear(2, 2).to("gpu").weight, torch.ones(2).new_tensor([1.0], device="gpu")),
        ]
        with torch.device("gpu"):
            made += [torch.randn(2), torch.tensor([1])]
        assert {each.device.index for each in made} == {2}
        with torch.accelerator.device_index(3):
            assert torch.ones(2).to("gpu").device.index == 3
    finally:
        torch.accelerator.set_device_index(0)


def case_device_contexts_place_what_is_made() -> None:
    with torch.device("gpu:3"):
        made = [torch.randn(2), torch.tensor([1]), torch.arange(3), nn.Linear(2, 2).weight, torch.eye(2)]
    assert {each.device for each in made} == {torch.device("gpu:3")}
    torch.set_default_device(GPU)
    try:
        assert torch.zeros(2).device.index == 1
    finally:
        torch.set_default_device(None)


def case_accelerator_answers() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == NUM_GPUS
    assert torch.accelerator.current_accelerator() == torch.device("gpu")
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(GPU)
    assert torch.accelerator.current_stream(GPU).device == torch.device(GPU)
    assert torch.get_device_module("gpu").device_count() == NUM_GPUS
    with pytest.raises(RuntimeError, match="gpu:9 does not exist"):
        torch.accelerator.set_device_index(9)


def case_factories_make_what_the_cpu_would() -> None:
    for make in (
        lambda device: torch.arange(1, 10, 2, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.full((2, 2), 7, device=device),
        lambda device: torch.tril_indices(3, 3, device=device),
        lambda device: torch.tensor([[1, 2]], device=device, dtype=torch.float64),
        lambda device: torch.zeros(0, 3, device=device),
        lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(3),
    ):
        there, here = make(GPU), make("cpu")
        assert there.device.index == 1
        assert (there.shape, there.dtype, there.stride()) == (here.shape, here.dtype, here.stride())
        assert torch.equal(there.cpu(), here)


# Memory that tensors share


def case_views_share_memory() -> None:
    base = torch.zeros(3, 4, device=GPU)
    base[1:].t().add_(1)
    base.view(-1)[0] = 5
    base.unfold(0, 1, 1).mul_(2)
    base.detach()[2, 3].copy_(7)
    alias = torch.empty(0, device=GPU).set_(base.untyped_storage(), 0, (12,), (1,))
    alias[1] = 9
    assert base.tolist() == [[10, 9, 0, 0], [2, 2, 2, 2], [2, 2, 2, 7]]
    assert base.view(torch.int32).device == base.device


def case_views_keep_autograd_right() -> None:
    grads = []
    for device in ("cpu", GPU):
        weight = torch.arange(6.0, device=device).requires_grad_()
        whole = weight * 1
        whole.view(2, 3)[0].mul_(3)
        whole[1::2].add_(whole[::2] * 2)
        whole.sum().backward()
        grads.append(weight.grad.cpu())
    assert torch.equal(*grads)


def case_write_that_backward_needs_is_refused() -> None:
    weight = torch.ones(2, device=GPU, requires_grad=True)
    squared = (weight * 1) ** 2
    held = weight * 1
    result = held * held
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result + squared).sum().backward()


def case_writes_are_counted_as_on_the_cpu() -> None:
    counts = []
    for device in ("cpu", GPU):
        weight, other = torch.ones(2, device=device), torch.ones(2, device=device)
        for write in (
            lambda weight, other: weight.add_(other),
            lambda weight, other: weight.copy_(other),
            lambda weight, other: weight.zero_(),
            lambda weight, other: weight[:1].fill_(3),
            lambda weight, other: torch.add(other, 1, out=weight),
            lambda weight, other: nn.init.normal_(weight),
            lambda weight, other: torch._foreach_add_([weight], [other], alpha=2.0),
            lambda weight, other: torch._foreach_copy_([weight], [other]),
            lambda weight, other: weight.data.add_(1),
        ):
            before = weight._version
            write(weight, other)
            counts.append(weight._version - before)
    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :]


def case_data_can_be_replaced() -> None:
    parameter = nn.Parameter(torch.ones(2, device=GPU))
    parameter.data = torch.zeros(3, device=GPU)
    assert parameter.tolist() == [0, 0, 0]
    parameter.data.add_(1)
    assert parameter.tolist() == [1, 1, 1]
    parameter.data = parameter.data.cpu()
    assert parameter.device.type == "cpu"
    parameter.data = torch.full((3,), 2.0).to("gpu:2")
    assert (parameter.device.index, parameter.requires_grad, parameter.tolist()) == (2, True, [2, 2, 2])


def case_out_arguments_are_written_and_resized() -> None:
    out = torch.empty(0, device=GPU)
    assert torch.add(torch.ones(3, device=GPU), 1, out=out) is out
    assert out.tolist() == [2, 2, 2]
    columns = torch.zeros(2, 4, device=GPU)
    torch.mul(torch.ones(2, 2, device=GPU), 3, out=columns[:, ::2])
    assert columns.tolist() == [[3, 0, 3, 0]] * 2
    assert torch.ones(2, device=GPU).resize_(5)[:2].tolist() == [1, 1]


# Training


def _trained(device: str, make: Callable[..., torch.optim.Optimizer], **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = make(model.parameters(), lr=0.1, **options)
    x, y = torch.randn(6, 4).to(device), torch.randn(6, 2).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [each.detach().cpu() for each in model.parameters()]


def case_optimizers_equal_the_cpu() -> None:
    for make, options in (
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
    ):
        torch.testing.assert_close(_trained(GPU, make, **options), _trained("cpu", make, **options), msg=f"{make}")


def case_optimizers_take_lists_of_tensors_by_themselves() -> None:
    with counted() as counts:
        _trained(GPU, torch.optim.Adam)
    assert any(name.startswith("_foreach_") for name in counts.kernels)


def _layer(make: Callable[[], nn.Module], *inputs: torch.Tensor, call: Any = None) -> None:
    """A layer gives what it gives on the CPU: its result, gradients and buffers."""
    torch.manual_seed(0)
    model, found = make(), []
    for device in ("cpu", GPU):
        own = copy.deepcopy(model).to(device)
        given = [each.to(device).detach().requires_grad_(each.is_floating_point()) for each in inputs]
        torch.manual_seed(5)
        result = call(own, *given) if call else own(*given)
        result = result[0] if isinstance(result, tuple) else result
        assert result.device.type == torch.device(device).type
        result.pow(2).sum().backward()
        grads = [each.grad for each in (*own.parameters(), *given)]
        found.append([each.detach().cpu() for each in (result, *grads, *own.buffers()) if each is not None])
    torch.testing.assert_close(*found)


def case_layers_equal_the_cpu() -> None:
    torch.manual_seed(1)
    picture, steps, rows = torch.randn(2, 3, 8, 8), torch.randn(3, 2, 4), torch.randn(5, 4)
    _layer(lambda: nn.Linear(4, 3), rows)
    _layer(lambda: nn.Conv2d(3, 4, 3, padding=1), picture)
    _layer(lambda: nn.Conv2d(3, 4, 3, bias=False), picture.contiguous(memory_format=torch.channels_last))
    _layer(lambda: nn.ConvTranspose2d(3, 4, 3), picture)
    _layer(lambda: nn.BatchNorm2d(3), picture)
    _layer(lambda: nn.LayerNorm(4), rows)
    _layer(lambda: nn.GroupNorm(2, 4), rows)
    _layer(lambda: nn.LSTM(4, 5, 2), steps)
    _layer(lambda: nn.LSTM(4, 5, bidirectional=True, bias=False), steps)
    _layer(lambda: nn.GRU(4, 5), steps)
    _layer(lambda: nn.GRUCell(4, 5, bias=False), rows)
    _layer(lambda: nn.RNN(4, 5), steps)
    _layer(lambda: nn.Embedding(4, 5), torch.tensor([1, 2, 1]))
    _layer(lambda: nn.Embedding(4, 5, max_norm=1.0), torch.tensor([1, 2]))
    _layer(lambda: nn.EmbeddingBag(4, 5), torch.tensor([[1, 2]]))
    _layer(lambda: nn.Dropout(0.5), rows)
    _layer(lambda: nn.MultiheadAttention(4, 2), steps, call=lambda own, x: own(x, x, x))
    _layer(lambda: nn.TransformerEncoderLayer(4, 2, 8), steps)
    _layer(lambda: nn.Sequential(nn.MaxPool2d(2), nn.GELU(), nn.AdaptiveAvgPool2d(1)), picture)
    _layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), picture)
    _layer(nn.CrossEntropyLoss, rows, torch.tensor([1, 2, 0, 3, 3]))


def case_packed_sequences_take_lengths_of_the_host() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4, device=GPU), torch.tensor([3, 2]))
    result, _ = nn.LSTM(4, 5, device=GPU)(packed)
    result.data.sum().backward()
    assert nn.utils.rnn.pad_packed_sequence(result)[0].shape == (3, 2, 5)


def case_parameters_are_parameters() -> None:
    layer = nn.Linear(2, 2)
    weight, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), 0.5)
    layer(torch.ones(1, 2)).sum().backward()
    before, grad = weight.detach().clone(), weight.grad.clone()
    assert layer.to(GPU).weight is weight
    assert type(weight) is nn.Parameter
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight.detach().cpu(), before)
    assert torch.equal(weight.grad.cpu(), grad)
    layer(torch.ones(1, 2, device=GPU)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), before - grad)
    assert layer.cpu().weight is weight
    assert weight.device.type == "cpu"
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    tied.to(GPU)
    assert tied[1].weight is tied[0].weight
    handle = layer.bias.register_hook(lambda grad: grad * 3)
    seen: list[list[float]] = []
    layer.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.tolist()))
    layer.to(GPU).zero_grad()
    layer(torch.ones(1, 2, device=GPU)).sum().backward()
    handle.remove()
    layer.zero_grad()
    layer(torch.ones(1, 2, device=GPU)).sum().backward()
    assert seen == [[3, 3], [1, 1]]
    made = nn.Parameter(torch.ones(2, device=GPU))
    assert type(made) is nn.Parameter
    assert isinstance(made, nn.Parameter)
    assert made.requires_grad


def case_hooks_run_in_the_thread_of_the_device() -> None:
    for index in range(NUM_GPUS):
        seen: list[tuple[str, int]] = []

        def note(tensor: torch.Tensor, seen: list[tuple[str, int]] = seen) -> None:
            seen.append((str(tensor.device), threading.get_ident()))

        layer = nn.Linear(2, 2, device=f"gpu:{index}")
        layer.weight.register_hook(note)
        layer.bias.register_post_accumulate_grad_hook(note)
        layer(torch.ones(1, 2, device=f"gpu:{index}")).sum().backward()
        assert {device for device, _ in seen} == {f"gpu:{index}"}
        assert len(seen) == 2
        assert {thread for _, thread in seen}.isdisjoint({threading.get_ident()})


def case_error_in_a_hook_reaches_the_caller_and_harms_nothing() -> None:
    def refuse(_: torch.Tensor) -> None:
        raise KeyError("mine")

    weight = torch.ones(2, device=GPU, requires_grad=True)
    handle = weight.register_hook(refuse)
    with pytest.raises(KeyError, match="mine"):
        weight.sum().backward()
    handle.remove()
    weight.sum().backward()
    assert weight.grad.tolist() == [1, 1]


def case_backward_goes_through_several_devices() -> None:
    weight = torch.ones(2, device=GPU, requires_grad=True)
    ((weight * 2).to("gpu:3").sum() * 3).to("cpu").backward()
    assert weight.grad.tolist() == [6, 6]
    assert weight.grad.device == weight.device


def case_backward_of_several_threads() -> None:
    weights = [torch.ones(2, device=f"gpu:{index}", requires_grad=True) for index in range(3)]
    threads = [threading.Thread(target=lambda own=own: (own * 2).sum().backward()) for own in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [own.grad.tolist() for own in weights] == [[2, 2]] * 3


def case_gradients_of_gradients() -> None:
    value = torch.full((2,), 2.0, device=GPU, requires_grad=True)
    (first,) = torch.autograd.grad((value**3).sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    assert (first.tolist(), second.tolist()) == ([12, 12], [12, 12])
    assert torch.func.grad(lambda x: (x**2).sum())(value.detach()).tolist() == [4, 4]


def case_backward_sees_the_device_and_modes_of_its_caller() -> None:
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((torch.zeros(1, device="gpu").device.index, torch.is_grad_enabled()))
            return grad

    seen: list[tuple[int, bool]] = []
    with torch.accelerator.device_index(2):
        Looks.apply(torch.ones(1, device="gpu", requires_grad=True)).sum().backward()
    assert seen == [(2, False)]


def case_checkpointing_recomputes() -> None:
    for reentrant in (False, True):
        grads = []
        for device in ("cpu", GPU):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(device)
            x = torch.ones(2, 3).to(device).requires_grad_()
            torch.manual_seed(3)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            grads.append([x.grad.cpu(), *(each.grad.cpu() for each in model.parameters())])
        torch.testing.assert_close(*grads)


def case_autocast_lowers_and_raises_precision() -> None:
    layer = nn.Linear(3, 2, device=GPU)
    x = torch.ones(2, 3, device=GPU)
    with torch.autocast("gpu", dtype=torch.bfloat16):
        result = layer(x)
        loss = nn.functional.mse_loss(result, torch.zeros_like(result))
        assert (result.dtype, result.softmax(-1).dtype, loss.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        with torch.autocast("gpu", enabled=False):
            assert layer(x).dtype == torch.float32
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def case_gradient_scaler() -> None:
    layer = nn.Linear(3, 2, device=GPU)
    before = layer.weight.detach().clone()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler("gpu", init_scale=8.0)
    with torch.autocast("gpu", dtype=torch.float16):
        loss = layer(torch.ones(2, 3, device=GPU)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(before - layer.weight.detach(), torch.full_like(before, 0.2))


# Random numbers


def case_seeds_give_the_numbers_of_the_cpu() -> None:
    for draw in (
        lambda device: torch.randn(3, device=device),
        lambda device: torch.randperm(5, device=device),
        lambda device: torch.multinomial(torch.ones(4, device=device), 2),
        lambda device: nn.functional.dropout(torch.ones(9, device=device)),
    ):
        drawn = []
        for device in ("cpu", GPU):
            torch.manual_seed(3)
            drawn.append(draw(device).cpu())
        assert torch.equal(*drawn)


def case_each_device_draws_from_its_own_generator() -> None:
    torch.manual_seed(0)
    first = torch.randn(2, device="gpu:0")
    assert torch.equal(torch.randn(2, device=GPU).cpu(), first.cpu())
    state = torch.gpu.get_rng_state(GPU)
    after = torch.randn(2, device=GPU)
    host = torch.random.get_rng_state()
    torch.gpu.set_rng_state(state, GPU)
    assert torch.equal(torch.randn(2, device=GPU), after)
    nn.functional.dropout(torch.ones(3, device=GPU))
    assert torch.equal(torch.random.get_rng_state(), host)
    with torch.random.fork_rng(devices=[1], device_type="gpu"):
        inside = torch.randn(2, device=GPU)
    nn.functional.dropout(torch.ones(3, device="gpu:0"))
    assert torch.equal(torch.randn(2, device=GPU), inside)


def case_generators_belong_to_devices() -> None:
    own = torch.Generator(GPU).manual_seed(3)
    assert own.device == torch.device(GPU)
    assert isinstance(own, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    there = torch.randn(3, device=GPU, generator=own)
    assert torch.equal(there.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(3)))
    for wrong in (torch.Generator(), torch.Generator("gpu:0")):
        with pytest.raises(RuntimeError, match="Expected a 'gpu:1' device for generator"):
            torch.randn(3, device=GPU, generator=wrong)


# State that is kept


def case_state_is_saved_and_loaded_anywhere() -> None:
    layer = nn.Linear(2, 2, device=GPU)
    written = io.BytesIO()
    torch.save(layer.state_dict(), written)
    for place, expected in (
        (None, "gpu:1"),
        ("cpu", "cpu"),
        ("gpu:2", "gpu:2"),
        (torch.device("gpu:3"), "gpu:3"),
        ({"gpu:1": "gpu:0"}, "gpu:0"),
    ):
        written.seek(0)
        state = torch.load(written, map_location=place)
        assert str(state["weight"].device) == expected
        assert torch.equal(state["weight"].cpu(), layer.weight.detach().cpu())
    other = nn.Linear(2, 2, device="gpu:2")
    other.load_state_dict(state)
    assert other.weight.device.index == 2
    assert torch.equal(other.weight.detach().cpu(), layer.weight.detach().cpu())


def case_modules_are_copied_and_pickled() -> None:
    layer = nn.Linear(2, 2, device=GPU)
    tied = nn.ModuleList([layer, layer])
    for made in (copy.deepcopy(tied), pickle.loads(pickle.dumps(tied))):  # noqa: S301
        assert made[0].weight is made[1].weight
        assert made[0].weight.device.index == 1
        assert made[0].weight.data_ptr() != layer.weight.data_ptr()
        assert torch.equal(made[0].weight, layer.weight)
    whole = torch.ones(3, device=GPU)
    first, second = copy.deepcopy([whole, whole[1:]])
    second.add_(1)
    assert first.tolist() == [1, 2, 2]


def case_optimizer_state_is_kept_on_the_device() -> None:
    layer = nn.Linear(2, 2, device=GPU)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2, device=GPU)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["exp_avg"].device.index == 1
    optimizer.load_state_dict(state)
    optimizer.step()


# Copies, streams and what the host waits for


def case_pinned_memory_is_known() -> None:
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    assert not torch.ones(3, device=GPU).is_pinned()
    loader = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert [batch.is_pinned() for batch in batches] == [True, True]
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]


def case_waits_of_the_host_are_counted() -> None:
    there, pinned = torch.ones(3, device=GPU), torch.ones(3).pin_memory()
    for call, expected in (
        (there[0].item, {"_local_scalar_dense": 1}),
        (lambda: bool(there[0]), {"_local_scalar_dense": 1}),
        (lambda: torch.equal(there, there), {"equal": 1}),
        (there.cpu, {"copy to the host": 1}),
        (there.tolist, {"copy to the host": 1}),
        (lambda: torch.ones(3).to(GPU), {"copy to the device": 1}),
        (lambda: torch.ones(3).to(GPU, non_blocking=True), {"copy to the device": 1}),
        (there.nonzero, {"nonzero": 1}),
        (torch.accelerator.synchronize, {"synchronize": 1}),
        (lambda: pinned.to(GPU, non_blocking=True), {}),
        (lambda: there.to("gpu:0"), {}),
        (lambda: there.add(1).sum(0), {}),
        (lambda: there.view(3, 1).t(), {}),
    ):
        with counted() as counts:
            call()
        assert dict(counts.waits) == expected


def case_kernels_are_counted_by_name() -> None:
    there = torch.ones(3, device=GPU)
    with counted() as counts:
        torch.add(there, 1).mul_(2)
        there.view(3, 1)
    assert dict(counts.kernels) == {"add": 1, "mul_": 1}
    assert counts.num_kernels == 2
    assert dict(counts.allocations) == {1: 1}
    torch.add(there, 1)
    assert counts.num_kernels == 2


def case_training_step_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)).to(GPU)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 1, 4, 4, device=GPU), torch.tensor([0, 1, 2, 0], device=GPU)
    with counted() as counts:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert not counts.waits
    assert counts.num_kernels > 10


def case_streams_and_events_keep_their_order() -> None:
    there = torch.ones(2, device=GPU)
    side, begun, done = torch.Stream(GPU), torch.Event(GPU), torch.Event(GPU, enable_timing=True)
    assert side.stream_id != torch.accelerator.current_stream(GPU).stream_id
    assert isinstance(torch.accelerator.current_stream(GPU), torch.Stream)
    with counted() as counts:
        begun.record(torch.accelerator.current_stream(GPU))
        with side:
            side.wait_event(begun)
            assert torch.accelerator.current_stream(GPU).stream_id == side.stream_id
            there.add_(1)
            done.record(side)
        torch.accelerator.current_stream(GPU).wait_event(done)
        there.mul_(2)
        done.synchronize()
    main = 0
    assert [(entry.stream, entry.name.split(" event")[0]) for entry in counts.order] == [
        (main, "record"),
        *((side.stream_id, "wait"), (side.stream_id, "add_"), (side.stream_id, "record")),
        *((main, "wait"), (main, "mul_")),
    ]
    assert dict(counts.waits) == {"event.synchronize": 1}
    assert torch.accelerator.current_device_index() == 0


def case_backward_gives_its_work_to_the_stream_of_its_caller() -> None:
    weight = torch.ones(2, device=GPU, requires_grad=True)
    side = torch.Stream(GPU)
    with counted() as counts, side:
        (weight * 2).sum().backward()
    assert {entry.stream for entry in counts.order} == {side.stream_id}


# Memory


def case_memory_is_counted_and_given_back() -> None:
    gc.collect()
    before = sg.config.get_memory_info(GPU)["current"]
    held = torch.empty(2**20, device=GPU)
    view = held[5:]
    assert sg.config.get_memory_info(GPU)["current"] - before == 2**22
    assert torch.accelerator.memory_allocated(1) - before == 2**22
    del held
    assert sg.config.get_memory_info(GPU)["current"] - before == 2**22
    del view
    assert sg.config.get_memory_info(GPU)["current"] == before
    assert sg.config.get_memory_info(GPU)["peak"] >= before + 2**22
    sg.config.reset_memory_stats(GPU)
    assert sg.config.get_memory_info(GPU)["peak"] == before
    free, total = torch.accelerator.get_memory_info(1)
    assert (total, total - free) == (LIMIT * 2**20, before)


def case_more_than_the_limit_is_an_error_that_names_it() -> None:
    held = [torch.empty(12 * 2**20, device=GPU)]
    for call in (
        lambda: torch.empty(8 * 2**20, device=GPU),
        lambda: held[0] + 1,
        lambda: torch.ones(8 * 2**20).to(GPU),
    ):
        with pytest.raises(sg.OutOfMemoryError, match=r"/device:GPU:1.*its limit of 64 MiB") as caught:
            call()
        assert caught.value.device == "/device:GPU:1"
        assert caught.value.limit_bytes == LIMIT * 2**20
        assert caught.value.requested_bytes in (32 * 2**20, 48 * 2**20)
        assert isinstance(caught.value, torch.OutOfMemoryError)
    assert torch.empty(8 * 2**20, device="gpu:0").numel() == 8 * 2**20
    held.clear()
    assert torch.empty(8 * 2**20, device=GPU).numel() == 8 * 2**20


def case_share_of_a_device_has_its_own_limit() -> None:
    share = sg.config.LogicalDeviceConfiguration(memory_limit=16)
    sg.config.set_logical_device_configuration("gpu:0", [share, share])
    with serve("/gpu:1") as device:  # the second share of the first device
        assert str(device.torch_device) == "gpu:0"
        assert torch.ones(2).to("gpu").device == device.torch_device
        with pytest.raises(sg.OutOfMemoryError, match="limit of 16 MiB"):
            torch.empty(5 * 2**20, device="gpu:0")
    torch.empty(5 * 2**20, device="gpu:0")
    prepare()


# What they cannot do


def case_numbers_of_the_program_have_the_type_that_they_have_on_the_cpu() -> None:
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16):
        for host in (torch.tensor(5, dtype=dtype), torch.tensor([5, 6], dtype=dtype)):
            tensor = host.to("gpu:0")
            for number in (3, 2.5):
                for ours, theirs in ((tensor % number, host % number), (number % tensor, number % host)):
                    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


def case_bits_of_whole_numbers_mix_with_numbers_of_the_program() -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool):
        for host in (torch.tensor(5).to(dtype), torch.tensor([5, 6, 7]).to(dtype)):
            tensor = host.to(GPU)
            for number in (3, True, 0xFFFF_FFFF, 2**40):
                for operate in (operator.and_, operator.or_, operator.xor):
                    expected = operate(host, number)
                    for found in (operate(tensor, number), operate(number, tensor)):
                        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def case_sparse_and_nested_tensors_are_refused_by_name() -> None:
    indices, values = torch.tensor([[0, 1]], device=GPU), torch.ones(2, device=GPU)
    table = nn.Embedding(5, 2, sparse=True, device=GPU)
    bag = nn.EmbeddingBag(5, 2, sparse=True, device=GPU)
    for call in (
        lambda: table(torch.tensor([1, 3], device=GPU)).sum().backward(),
        lambda: bag(torch.tensor([[1, 3]], device=GPU)).sum().backward(),
        lambda: torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False),
        lambda: torch.zeros(2, 2, layout=torch.sparse_coo, device=GPU),
        lambda: torch.eye(2).to_sparse().to(GPU),
        lambda: torch.eye(2).to_sparse() @ torch.ones(2, 2, device=GPU),
    ):
        with pytest.raises(NotImplementedError, match=r"^aten\.\S+ cannot run on strict devices: .*sparse") as caught:
            call()
        assert "tensor.cpu()" in str(caught.value)
        assert "fburl" not in str(caught.value)
    assert table.weight.grad is None


def case_kernel_that_cannot_run_is_named() -> None:
    there = torch.eye(2, device=GPU)
    with pytest.raises(NotImplementedError, match=r"aten\._to_sparse.*cannot run on strict devices"):
        there.to_sparse()
    with pytest.raises(NotImplementedError, match=r"cudnn.*cannot run on strict devices"):
        torch.ops.aten.cudnn_grid_sampler(torch.ones(1, 1, 2, 2, device=GPU), torch.ones(1, 2, 2, 2, device=GPU))


# Strict devices among stratagem's


def case_devices_are_listed() -> None:
    listed = sg.config.list_physical_devices("GPU")
    assert len(listed) == NUM_GPUS
    assert all(device.simulated for device in listed)
    names = [str(device.torch_device) for device in sg.config.list_logical_devices("GPU")]
    assert names == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    details = sg.config.get_device_details("gpu:0")
    assert (details.device_name, details.total_memory_bytes) == ("simulated GPU (strict)", LIMIT * 2**20)


def case_errors_of_kernels_in_a_backward_pass_reach_the_caller() -> None:
    class Grows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.expand(2**26).contiguous()[:1]

    weight = torch.ones(1, device=GPU, requires_grad=True)
    with pytest.raises(sg.OutOfMemoryError, match="/device:GPU:1"):
        Grows.apply(weight).sum().backward()
    spread = torch.ones(1, device=GPU, requires_grad=True)
    handle = spread.register_hook(lambda grad: grad + torch.ones(1, device="gpu:0"))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        (spread * 2).sum().backward()
    handle.remove()
    (spread * 2).sum().backward()
    assert spread.grad.tolist() == [2]


def case_devices_in_use_are_not_made_strict() -> None:
    with (
        serve("gpu:0"),
        pytest.raises(sg.errors.DevicesInUseError, match=r"simulate_devices\('GPU', 2\) came too late"),
    ):
        sg.config.simulate_devices("GPU", 2, strict=True)
    assert torch.accelerator.device_count() == NUM_GPUS


def case_number_of_devices_may_change() -> None:
    sg.config.simulate_devices("GPU", 2, memory_limit=32, strict=True)
    assert torch.accelerator.device_count() == 2
    assert [str(device.torch_device) for device in sg.config.list_logical_devices("GPU")] == ["gpu:0", "gpu:1"]
    sg.config.simulate_devices("GPU", 2)
    assert {str(device.torch_device) for device in sg.config.list_logical_devices("GPU")} == {"cpu"}
    prepare()
    assert torch.accelerator.device_count() == NUM_GPUS
