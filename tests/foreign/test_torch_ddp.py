"""What PyTorch's own suites try on DistributedDataParallel, written again in small."""

import contextlib
import copy
import dataclasses
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from tests.foreign.parts import classify, images, made, mlp, vectors, weights
from tests.foreign.programs import PRIVATE, SELDOM, Program, Programs, Runner

programs = Programs(seldom=SELDOM)


@contextlib.contextmanager
def unsynced(on: Runner) -> Iterator[None]:
    with sg.get_strategy().no_sync() if on.strategy is not None else contextlib.nullcontext():
        yield


# Which parameters a pass uses


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if bool((x[:, 0] > 50).any()) else 0)


@programs(seldom=())
def parameters_that_one_replica_uses_and_that_none_uses(on: Runner) -> Any:
    model, optimizer = made(on, Branches)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        uses = x[:, 0] > 50
        out = model.always(x)
        if bool(uses.any()):
            out = out + torch.zeros_like(out).masked_scatter(uses[:, None].expand_as(out), model.sometimes(x[uses]))
        out.square().mean().backward()
        optimizer.step()

    x, _ = vectors(6)
    x[5, 0] = 99.0
    on(step, x)
    on(step, x.clamp(max=1.0))
    return weights(model)


@programs()
def gradients_of_unused_parameters_stay_as_they_are(on: Runner) -> Any:
    model, optimizer = made(on, Branches)

    def step(x: torch.Tensor, zeroes: bool, every: bool) -> None:
        if zeroes:
            optimizer.zero_grad()
        out = model.always(x) + model.sometimes(x) if every else model.always(x)
        out.square().mean().backward()

    on(step, vectors()[0], zeroes=True, every=True)
    on(step, vectors()[0], zeroes=False, every=False)
    return weights(model)


@programs(linear=True)
def outputs_that_the_loss_ignores(on: Runner) -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.used, self.ignored = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x)
            return self.used(hidden), self.ignored(hidden)

    model, optimizer = made(on, Two)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        output, ignored = model(x)
        functional.cross_entropy(output, y).backward()
        optimizer.step()
        return ignored

    return [on.rows(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True)
def a_pass_for_each_head(on: Runner) -> Any:
    body, first, second, optimizer = made(on, lambda: nn.Linear(4, 5), lambda: nn.Linear(5, 3), lambda: nn.Linear(5, 1))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = body(x)
        functional.cross_entropy(first(hidden), y).backward(retain_graph=True)
        second(hidden).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return [dict(each.named_parameters()) for each in (body, first, second)]


@programs(linear=True)
def two_models_in_turns(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        models = [mlp(), mlp()]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in models]
    return [classify(on, models[k], optimizers[k], vectors(5), 1) for k in (0, 1, 0, 0, 1)]


@programs(linear=True)
def control_flow_by_the_step(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))

    def step(x: torch.Tensor, depth: int) -> torch.Tensor:
        optimizer.zero_grad()
        for layer in list(model)[:depth]:
            x = layer(x).tanh()
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0], depth=depth)) for depth in (1, 3, 2, 3)], dict(model.named_parameters())


@programs(linear=True)
def tensors_made_in_forward(on: Runner) -> Any:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.linear(x), "mask": torch.ones_like(x, requires_grad=True) * 2, "ids": torch.arange(3)}

    model, optimizer = made(on, Making)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = model(x)
        (found["out"] * found["mask"]).square().mean().backward()
        optimizer.step()
        return found["ids"]

    return on.first(on(step, vectors()[0])), dict(model.named_parameters())


# Accumulation


@programs(seldom=(), linear=True)
def accumulation_under_no_sync(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with unsynced(on):
            (functional.cross_entropy(model(x), y) / 2).backward()
        (functional.cross_entropy(model(2 * x), y) / 2).backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs()
def accumulation_under_no_sync_over_runs(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor, last: bool) -> None:
        with contextlib.nullcontext() if last else unsynced(on):
            functional.cross_entropy(model(x), y).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for number, rows in enumerate((7, 5, 6, 2)):
        on(step, *vectors(rows), last=number % 2 == 1)
    return dict(model.named_parameters())


@programs(linear=True)
def forward_under_no_sync_and_backward_after_it(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with unsynced(on):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs()
def gradients_zeroed_in_place(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        on(step, *vectors())
    return weights(model)


@programs(linear=True)
def batches_that_shrink(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    return [classify(on, model, optimizer, vectors(rows), 1) for rows in (7, 3, 2, 1, 4)]


@programs()
def forwards_without_gradients_between(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def look(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = look(x)
        optimizer.zero_grad()
        functional.cross_entropy(model(x) - before, y).backward()
        optimizer.step()
        return look(x)

    return [(on.rows(on(step, *vectors())), on.rows(on(look, vectors()[0]))) for _ in range(2)]


# Checkpointed activations


@programs(linear=True)
def a_layer_checkpointed_twice(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for reentrant in (False, True):
            out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
            out = checkpoint(model, out, use_reentrant=reentrant)
            out.square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, vectors()[0])
    return dict(model.named_parameters())


@programs(linear=True)
def checkpoints_with_weights_that_are_shared(on: Runner) -> Any:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))

    model, optimizer = made(on, Shared)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        for reentrant in (False, True):
            model(x.clone().requires_grad_(), reentrant).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, vectors()[0])
    return dict(model.named_parameters())


# Batch normalization over all replicas


def normed(on: Runner, layers: nn.Sequential) -> nn.Sequential:
    return layers if on.strategy is None else sg.convert_sync_batchnorm(layers)


@programs(tolerance=2e-5, seldom=())
def batch_norm_over_all_replicas(on: Runner) -> Any:
    model, optimizer = made(on, lambda: normed(on, nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))))
    found = [classify(on, model, optimizer, vectors(rows), 1) for rows in (7, 5, 6)]

    def test(x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            return model(x)

    return found, on.rows(on(test, vectors(5)[0]))


@programs(tolerance=2e-5)
def batch_norm_of_images_without_weights(on: Runner) -> Any:
    def net() -> nn.Module:
        return normed(
            on,
            nn.Sequential(
                *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 3, 3)),
                *(nn.BatchNorm2d(3, momentum=None), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            ),
        ).to(memory_format=torch.channels_last)

    model, optimizer = made(on, net)
    return classify(on, model, optimizer, images(7))


@programs(tolerance=2e-5)
def batch_norm_that_keeps_no_statistics(on: Runner) -> Any:
    def net() -> nn.Module:
        return normed(on, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)))

    model, optimizer = made(on, net)
    model.eval()
    return classify(on, model, optimizer, vectors())


@programs(tolerance=2e-5)
def batch_norm_in_training_then_fixed(on: Runner) -> Any:
    model, optimizer = made(on, lambda: normed(on, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    first = classify(on, model, optimizer, vectors(), 1)
    model[1].eval()
    second = classify(on, model, optimizer, vectors(), 1)
    model[1].train()
    return first, second, classify(on, model, optimizer, vectors(3), 1)


# Buffers


@programs(seldom=(), linear=True)
def buffer_that_counts_steps(on: Runner) -> Any:
    class Counting(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scale", torch.tensor([1.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
                self.scale = self.scale * 0.9
            return self.linear(x) * self.scale

    model, optimizer = made(on, Counting)
    found = classify(on, model, optimizer, vectors(), 3)
    return found, model.state_dict()


@programs(linear=True)
def buffer_written_by_the_main_program(on: Runner) -> Any:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.mask

    model, optimizer = made(on, Masked)
    first = classify(on, model, optimizer, vectors(), 1)
    model.mask[1] = 0.0
    second = classify(on, model, optimizer, vectors(), 1)
    model.mask = torch.tensor([0.0, 1.0, 2.0])
    return first, second, classify(on, model, optimizer, vectors(), 1)


# Kinds of parameters


@programs(linear=True)
def parameters_of_odd_shapes(on: Runner) -> Any:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.turned = nn.Parameter(torch.randn(4, 3).t())
            self.one = nn.Parameter(torch.randn(1, 1, 1))
            self.many = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(2))
            self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(3))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.scale * functional.linear(x, self.turned) + self.one[0] * self.many[0] * self.many[1]
            return out + self.named["shift"] + self.empty.sum()

    model, optimizer = made(on, Odd)
    return classify(on, model, optimizer, vectors()), [each.stride() for each in model.parameters()]


@programs(linear=True, tolerance=1e-12)
def a_model_in_double(on: Runner) -> Any:
    model, optimizer = made(on, lambda: mlp().double())
    x, y = vectors()
    return classify(on, model, optimizer, (x.double(), y), 3)


@programs(tolerance=3e-2)
def a_model_in_bfloat16(on: Runner) -> Any:
    model, optimizer = made(on, lambda: mlp().bfloat16())
    x, y = vectors()
    return classify(on, model, optimizer, (x.bfloat16(), y))


@programs(linear=True)
def a_module_at_two_places(on: Runner) -> Any:
    def net() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer, nn.Linear(4, 3)))

    model, optimizer = made(on, net)
    return classify(on, model, optimizer, vectors())


@programs(linear=True)
def a_layer_that_comes_later(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    first = classify(on, model, optimizer, vectors())
    with on.scope():
        torch.manual_seed(5)
        model.insert(1, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2})
    return first, classify(on, model, optimizer, vectors())


@programs(linear=True)
def a_lazy_layer(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))
        model(torch.zeros(1, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return classify(on, model, optimizer, vectors())


# Inputs and outputs


class Sample(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    loss: torch.Tensor


@programs(linear=True)
def named_tuples_in_and_dataclasses_inside(on: Runner) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, sample: Sample, *, scale: float = 1.0) -> Output:
            scores = scale * self.linear(sample.x)
            return Output(scores, functional.cross_entropy(scores, sample.y))

    model, optimizer = made(on, Model)

    def step(sample: Sample, extra: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        output = model(sample, scale=2.0)
        (output.loss + (extra["weight"] * output.scores.square().mean(dim=1)).mean()).backward()
        optimizer.step()
        return output.scores

    x, y = vectors()
    found = [on.rows(on(step, Sample(x, y), {"weight": torch.linspace(0, 1, 7)})) for _ in range(2)]
    return found, dict(model.named_parameters())


@programs(linear=True)
def an_output_without_a_gradient(on: Runner) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.frozen(x)

    model, optimizer = made(on, Model)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        out, wanted = model(x)
        functional.mse_loss(out, wanted).backward()
        optimizer.step()
        return wanted.requires_grad, out.requires_grad

    return on.first(on(step, vectors()[0])), dict(model.named_parameters())


# Hooks


@programs(linear=True)
def hooks_of_modules(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    handle = model[2].register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
    first = classify(on, model, optimizer, vectors())
    handle.remove()
    return first, classify(on, model, optimizer, vectors())


@programs()
def gradients_of_what_lies_between(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        hidden.retain_grad()
        hidden.register_hook(lambda gradient: 2 * gradient)
        functional.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()
        return hidden.grad

    return on.rows(on(step, *vectors())), weights(model)


# After a failed run torch.distributed connects anew, which counts as something left behind.
@programs(
    refused="register_multi_grad_hook waits for gradients inside a backward pass", without=("one device", *PRIVATE)
)
def hook_of_several_gradients(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Linear(4, 3))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        norms: list[torch.Tensor] = []
        handle = torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: norms.extend(each.norm() for each in grads)
        )
        try:
            functional.cross_entropy(model(x), y).backward()
        finally:
            handle.remove()
        optimizer.step()
        return norms

    return on.first(on(step, *vectors())), dict(model.named_parameters())


@programs(known="hooks of the node that accumulates a gradient see that of their replica, before the sum")
def hook_of_the_node_that_accumulates(on: Runner) -> Any:
    """As reducers written by hand attach theirs."""
    model, optimizer = made(on, lambda: nn.Linear(4, 3, bias=False))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        norms: list[torch.Tensor] = []
        node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
        handle = node.register_hook(lambda *_: norms.append(model.weight.grad.norm()))
        try:
            functional.cross_entropy(model(x), y).backward()
        finally:
            handle.remove()
        optimizer.step()
        return norms

    return on.first(on(step, *vectors())), dict(model.named_parameters())


@programs(linear=True)
def saved_tensors_packed(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each.detach().clone(), lambda each: each):
            loss = functional.cross_entropy(model(x), y)
        with torch.autograd.graph.save_on_cpu():
            loss = loss + model(x).square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs(linear=True)
def optimizer_hooks(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    @torch.no_grad()
    def shrink(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(shrink)
    return classify(on, model, optimizer, vectors(), 3)


# States


@programs(linear=True)
def saved_to_bytes_and_loaded(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    classify(on, model, optimizer, vectors())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    classify(on, model, optimizer, vectors(5))
    file.seek(0)
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return classify(on, model, optimizer, vectors())


@programs(linear=True)
def a_whole_model_from_a_file(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    classify(on, model, optimizer, vectors())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with on.scope():
        model = torch.load(file, weights_only=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return classify(on, model, optimizer, vectors())


@programs(linear=True)
def hooks_of_states(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.__delitem__(f"{prefix}2.bias"))
    model.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: state.setdefault("2.bias", torch.ones(3)))
    classify(on, model, optimizer, vectors())
    state = model.state_dict()
    model.load_state_dict(state)
    return len(state), classify(on, model, optimizer, vectors())


@programs(linear=True)
def a_copy_kept_aside(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    first = copy.deepcopy(model.state_dict())
    classify(on, model, optimizer, vectors())
    model.load_state_dict(first)
    return classify(on, model, optimizer, vectors(), 1)


@programs(linear=True)
def weights_set_through_data(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    first = classify(on, model, optimizer, vectors(), 1)
    model[0].weight.data = torch.full((8, 4), 0.1, device=model[0].weight.device)
    second = classify(on, model, optimizer, vectors(), 1)
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    return first, second, classify(on, model, optimizer, vectors(), 1)


@programs(linear=True)
def weights_written_through_data(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    classify(on, model, optimizer, vectors(), 1)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    return classify(on, model, optimizer, vectors(), 1)


@programs(linear=True)
def anomalies_looked_for(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(True):
            functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


# Ways to call


@programs(tolerance=1e-5)
def options_of_optimizers(on: Runner) -> Any:
    optim, found = torch.optim, []
    makers: list[Any] = [
        lambda own: optim.SGD(own, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01, maximize=True),
        lambda own: optim.SGD(own, lr=torch.tensor(0.1), momentum=0.9, nesterov=True, foreach=False),
        lambda own: optim.Adam(own, lr=0.01, amsgrad=True, foreach=True),
        lambda own: optim.AdamW(own, lr=0.01, fused=True),
        lambda own: optim.Adam(own, lr=torch.tensor(0.01), foreach=False),
        lambda own: optim.Adagrad(own, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
        lambda own: optim.RMSprop(own, lr=0.01, centered=True, momentum=0.9),
        lambda own: optim.NAdam(own, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
        lambda own: optim.Muon(own, lr=0.01),
    ]
    for make in makers:
        with on.scope():
            torch.manual_seed(3)
            model = nn.Linear(4, 3, bias=False)
            optimizer = make(model.parameters())
        found.append(classify(on, model, optimizer, vectors(), 2)[1])
    return found


@programs(linear=True)
def backward_of_several_losses_at_once(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores = model(x)
        each = functional.cross_entropy(scores, y, reduction="none")
        weights = torch.full((len(x),), 1 / len(x), device=x.device), torch.tensor(0.5, device=x.device)
        torch.autograd.backward([each, scores.square().mean()], weights, retain_graph=True)
        each.backward(gradient=torch.full((len(x),), 0.1 / len(x), device=x.device))
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs(linear=True)
def a_trainer_with_methods(on: Runner) -> Any:
    class Trainer:
        def __init__(self) -> None:
            with on.scope():
                torch.manual_seed(3)
                self.model = mlp()
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scale = 1.0

        def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.scale * self.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        @staticmethod
        def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(scores, y)

        def fit(self) -> list[Any]:
            losses = []
            for _ in range(3):
                losses.append(on.mean(on(self.step, *vectors())))
                self.scale *= 0.5
            return losses

    trainer = Trainer()
    return trainer.fit(), dict(trainer.model.named_parameters())


@programs()
def norms_by_hand(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        own = [each.grad for each in model.parameters()]
        total = nn.utils.get_total_norm(own)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        after = torch.norm(torch.stack([torch.norm(each, 2) for each in own]), 2)
        optimizer.step()
        return total, after

    return [on.first(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True)
def steps_that_leave_early(on: Runner) -> Any:
    """A loss that is no number ends the step in all replicas, since all look at that of all."""
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> bool:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        total = loss.detach() if on.strategy is None else sg.get_replica_context().all_reduce("sum", loss.detach())
        if not bool(total.isfinite()):
            return False
        loss.backward()
        optimizer.step()
        return True

    x, y = vectors()
    bad = x.clone()
    bad[6, 0] = torch.nan
    return [on.first(on(step, each, y)) for each in (x, bad, x)], dict(model.named_parameters())


@programs(refused="convert a model before its first run", without=PRIVATE)
def a_model_that_changes_its_type(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    classify(on, model, optimizer, vectors(), 1)
    model.double()
    x, y = vectors()
    try:
        classify(on, model, optimizer, (x.double(), y), 2)
    finally:
        model.float()  # one that cannot be given out would be in the way of all others


@programs(linear=True, tolerance=1e-5)
def averages_and_statistics_afterwards(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    model[1].eval()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    found = classify(on, model, optimizer, vectors(), 3, lambda: average.update_parameters(model))
    torch.optim.swa_utils.update_bn([vectors()[0], vectors(5)[0]], average, model[0].weight.device)
    return found, dict(average.module.named_parameters()), dict(average.module.named_buffers())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
