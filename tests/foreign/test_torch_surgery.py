"""Models, optimizers and buffers that the main program takes apart and puts together between two runs."""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils

import stratagem as sg
from tests.foreign.programs import SELDOM, Program, Programs, Runner

programs = Programs(seldom=(*SELDOM, "2 workers of 1"))
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")

OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    functools.partial(torch.optim.Adam, lr=0.01),
    functools.partial(torch.optim.Adafactor, lr=0.01),  # which is not split over the replicas
)


class Tower(nn.Module):
    """A body and a tail, and between them a head that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.tail = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).tanh() + self.shift
        return self.tail(self.head(x) if hasattr(self, "head") else x)


class Training:
    """A model with an optimizer of three groups, and the usual step; both may be replaced between runs."""

    def __init__(self, on: Runner, kind: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[0]) -> None:
        self.on, self.kind = on, kind
        with on.scope():
            torch.manual_seed(3)
            self.model: Any = Tower()
            self.optimizer: Any = kind([{"params": list(each.parameters())} for each in self.model.children()])
        numbers = torch.Generator().manual_seed(1)
        self.batch = torch.randn(7, 3, generator=numbers), torch.randn(7, 1, generator=numbers)

    def run(self, num_steps: int = 2) -> None:
        model, optimizer = self.model, self.optimizer

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        self.losses = [self.on.mean(self.on(step, *self.batch)) for _ in range(num_steps)]

    def new_head(self, **options: Any) -> None:
        with self.on.scope():
            torch.manual_seed(4)
            self.model.head = nn.Linear(4, 4, **options)

    def found(self) -> Any:
        return self.losses, {name: each.clone() for name, each in self.model.state_dict().items()}


def changed(
    on: Runner,
    *changes: Callable[[Training], Any],
    kinds: tuple[Callable[..., torch.optim.Optimizer], ...] = OPTIMIZERS[:2],
) -> Any:
    """What trainings come to that are changed after two runs, and go on."""
    found = []
    for kind in kinds:
        for change in changes:
            training = Training(on, kind)
            training.run()
            change(training)
            training.run()
            found.append(training.found())
    return found


# Parameters that come and go


def head_leaves(training: Training) -> None:
    del training.model.head
    del training.optimizer.param_groups[1]


def head_leaves_with_its_state(training: Training) -> None:
    for each in training.model.head.parameters():
        training.optimizer.state.pop(each, None)
    head_leaves(training)


def head_leaves_and_all_state(training: Training) -> None:
    head_leaves(training)
    training.optimizer.state.clear()
    gc.collect()


def late_head_leaves(training: Training) -> None:
    """One that lies in memory of its own."""
    training.new_head()
    training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())
    training.run()
    head_leaves_with_its_state(training)


def late_head_leaves_with_its_optimizer(training: Training) -> None:
    training.new_head()
    with training.on.scope():
        training.optimizer = training.kind(training.model.parameters())
    training.run()
    del training.model.head
    with training.on.scope():
        training.optimizer = training.kind(training.model.parameters())
    gc.collect()


def bias_leaves(training: Training) -> None:
    training.model.head.bias = None
    training.optimizer.param_groups[1]["params"].pop()


@programs()
def parameters_leave_with_their_group(on: Runner) -> Any:
    return changed(
        on, *(head_leaves, head_leaves_with_its_state, head_leaves_and_all_state, bias_leaves), kinds=OPTIMIZERS
    )


@programs()
def late_parameters_leave_with_their_group(on: Runner) -> Any:
    return changed(on, late_head_leaves, late_head_leaves_with_its_optimizer, kinds=OPTIMIZERS)


@programs(seldom=SELDOM)
def layer_replaced(on: Runner) -> Any:
    def in_the_same_group(training: Training) -> None:
        training.new_head(bias=False)
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())

    def in_a_new_group(training: Training) -> None:
        training.new_head()
        training.optimizer.add_param_group({"params": list(training.model.head.parameters()), "lr": 0.02})

    def with_a_new_optimizer(training: Training) -> None:
        training.new_head()
        with training.on.scope():
            training.optimizer = training.kind(training.model.parameters())

    def by_nothing(training: Training) -> None:
        with training.on.scope():
            training.model.head = nn.Identity()

    def parameter_replaced(training: Training) -> None:
        head = training.model.head
        with training.on.scope():
            head.weight = nn.Parameter(head.weight.detach() * 0.5)
        training.optimizer.param_groups[1]["params"][0] = head.weight

    return changed(
        on, in_the_same_group, in_a_new_group, with_a_new_optimizer, by_nothing, parameter_replaced, kinds=OPTIMIZERS
    )


@programs()
def weights_tied_and_untied(on: Runner) -> Any:
    def tied(training: Training) -> None:
        with training.on.scope():
            training.model.head = nn.Linear(4, 4)
        training.model.head.weight = training.model.head.weight
        training.model.extra = training.model.head
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())

    def bias_of_another(training: Training) -> None:
        training.model.head.bias = training.model.body.bias
        training.optimizer.param_groups[1]["params"].pop()

    def tied_then_untied(training: Training) -> None:
        own = training.model.head.bias
        training.model.head.bias = training.model.body.bias
        training.run()
        training.model.head.bias = own

    return changed(on, tied, bias_of_another, tied_then_untied)


@programs()
def frozen_and_thawed(on: Runner) -> Any:
    def frozen(training: Training) -> None:
        training.model.body.requires_grad_(False)

    def frozen_with_its_gradient(training: Training) -> None:
        training.model.body.requires_grad_(False)
        for each in training.model.body.parameters():
            each.grad = None

    def thawed(training: Training) -> None:
        training.model.head.requires_grad_(False)
        training.run()
        training.model.head.requires_grad_(True)

    def frozen_and_written_to(training: Training) -> None:
        training.model.head.requires_grad_(False)
        training.run(1)
        with torch.no_grad():
            training.model.head.weight.mul_(0.5)
        training.run(1)
        training.model.head.weight.requires_grad_()

    def new_layer_is_frozen_at_first(training: Training) -> None:
        training.new_head()
        training.model.head.requires_grad_(False)
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())
        training.run()
        training.model.head.requires_grad_(True)

    return changed(on, frozen, frozen_with_its_gradient, thawed, frozen_and_written_to, new_layer_is_frozen_at_first)


# Values


@programs(seldom=SELDOM)
def values_given_in_many_ways(on: Runner) -> Any:
    def data_assigned(training: Training) -> None:
        for each in training.model.parameters():
            each.data = each.data * 0.5

    def data_of_another(training: Training) -> None:
        training.model.head.weight.data = torch.eye(4, device=training.model.head.weight.device)

    def from_a_vector(training: Training) -> None:
        vector = nn.utils.parameters_to_vector(training.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, training.model.parameters())

    def through_numpy(training: Training) -> None:
        weight = training.model.head.weight.detach()
        if weight.is_cpu:
            weight.numpy()[...] *= 0.5
        else:
            weight.mul_(0.5)

    def through_a_view(training: Training) -> None:
        training.model.head.weight.detach()[1:].view(-1).mul_(0.5)

    def initialised_anew(training: Training) -> None:
        torch.manual_seed(5)
        training.model.head.reset_parameters()

    def swapped(training: Training) -> None:
        one, other = training.model.head.weight, training.model.tail.weight
        one.data[0], other.data[0] = other.data[0].clone(), one.data[0].clone()

    return changed(
        on, data_assigned, data_of_another, from_a_vector, through_numpy, through_a_view, initialised_anew, swapped
    )


@programs(tolerance=1e-5)  # with weights that are drawn anew, sums of large gradients nearly cancel
def loaded_from_a_state_dict(on: Runner) -> Any:
    def other(training: Training) -> dict[str, torch.Tensor]:
        torch.manual_seed(6)
        return {name: torch.randn(each.shape) for name, each in training.model.state_dict().items()}

    def in_place(training: Training) -> None:
        training.model.load_state_dict(other(training))

    def by_assignment(training: Training) -> None:
        with training.on.scope():
            new = {name: each.to(training.model.tail.bias.device) for name, each in other(training).items()}
            training.model.load_state_dict(new, assign=True)
            training.optimizer = training.kind(training.model.parameters())

    def back_and_forth(training: Training) -> None:
        model, optimizer = copy.deepcopy(training.model.state_dict()), copy.deepcopy(training.optimizer.state_dict())
        training.run()
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)

    return changed(on, in_place, by_assignment, back_and_forth, kinds=OPTIMIZERS)


@programs()
def buffers_changed_in_many_ways(on: Runner) -> Any:
    def in_place(training: Training) -> None:
        training.model.shift.add_(0.5)

    def through_data(training: Training) -> None:
        training.model.shift.data.add_(0.5)

    def through_numpy(training: Training) -> None:
        if training.model.shift.is_cpu:
            training.model.shift.numpy()[1:] += 0.5
        else:
            training.model.shift[1:] += 0.5

    def replaced(training: Training) -> None:
        training.model.shift = training.model.shift + 0.5

    def registered_anew(training: Training) -> None:
        training.model.register_buffer("shift", training.model.shift + 0.5, persistent=False)
        training.model.register_buffer("shift", training.model.shift, persistent=True)

    def dropped_for_a_number(training: Training) -> None:
        del training.model.shift
        training.model.shift = 0.5

    def made_a_parameter(training: Training) -> None:
        value = training.model.shift
        del training.model.shift
        with training.on.scope():
            training.model.shift = nn.Parameter(value + 0.5)
        training.optimizer.add_param_group({"params": [training.model.shift]})

    def added(training: Training) -> None:
        training.model.head.register_buffer("scale", torch.ones(4, device=training.model.tail.bias.device))
        training.run()
        training.model.head.scale.mul_(2)
        training.model.head.register_forward_hook(_scaled)

    return changed(
        on,
        *(in_place, through_data, through_numpy, replaced, registered_anew, dropped_for_a_number, made_a_parameter),
        added,
    )


def _scaled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * module.scale


# Hooks, parametrizations


@programs()
def hooks_that_come_and_go(on: Runner) -> Any:
    def of_gradients(training: Training) -> None:
        handles = [each.register_hook(lambda gradient: gradient * 0.5) for each in training.model.parameters()]
        training.run()
        for handle in handles[1:]:
            handle.remove()

    def of_the_forward_pass(training: Training) -> None:
        handle = training.model.head.register_forward_hook(lambda module, args, output: output * 0.5)
        training.run()
        handle.remove()
        training.model.tail.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def of_the_backward_pass(training: Training) -> None:
        training.model.head.register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))

    def of_the_update(training: Training) -> None:
        def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                nn.utils.clip_grad_value_(group["params"], 0.01)

        handle = training.optimizer.register_step_pre_hook(clip)
        training.run()
        handle.remove()

    def after_accumulation(training: Training) -> None:
        def scale(parameter: torch.Tensor) -> None:
            parameter.grad.mul_(0.5)

        training.model.head.weight.register_post_accumulate_grad_hook(scale)

    return changed(on, of_gradients, of_the_forward_pass, of_the_backward_pass, of_the_update, after_accumulation)


@programs()
def parametrized_layer_takes_the_place_of_another(on: Runner) -> Any:
    def weight_norm(training: Training) -> None:
        training.new_head()
        with training.on.scope():
            parametrizations.weight_norm(training.model.head)
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())

    def undone(training: Training) -> None:
        weight_norm(training)
        training.run()
        with training.on.scope():
            head = copy.deepcopy(training.model.head)
            parametrize.remove_parametrizations(head, "weight")
            training.model.head = head
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())

    def old_weight_norm(training: Training) -> None:
        training.new_head()
        with training.on.scope():
            nn.utils.weight_norm(training.model.head)
        training.optimizer.param_groups[1]["params"] = list(training.model.head.parameters())

    return changed(on, weight_norm, undone, old_weight_norm)


# Optimizers


@programs()
def optimizer_swapped(on: Runner) -> Any:
    def for_another_kind(training: Training) -> None:
        with training.on.scope():
            training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.02)

    def for_the_first_again(training: Training) -> None:
        first = training.optimizer
        with training.on.scope():
            training.optimizer = torch.optim.RMSprop(training.model.tail.parameters(), lr=0.02)
        training.run()
        training.optimizer = first

    def options_changed(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] = 0.1

    def groups_merged(training: Training) -> None:
        groups = training.optimizer.param_groups
        groups[0]["params"] += groups[1]["params"] + groups[2]["params"]
        del groups[1:]

    def groups_exchanged(training: Training) -> None:
        groups = training.optimizer.param_groups
        groups[0]["lr"] = 0.02
        groups.reverse()

    return changed(
        on, for_another_kind, for_the_first_again, options_changed, groups_merged, groups_exchanged, kinds=OPTIMIZERS
    )


class Doubled:
    factor = 2.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Halved(Doubled):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.factor


@programs()
def object_becomes_another_class(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale, found = Doubled(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = scale(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = (torch.randn(7, 3, generator=torch.Generator().manual_seed(1)),)
    for kind, factor in ((Doubled, 2.0), (Halved, 4.0), (Halved, 3.0), (Doubled, 0.5)):
        scale.__class__, scale.factor = kind, factor  # type: ignore[assignment]
        found += [on.mean(on(step, *batch)) for _ in range(2)]
    return found, model.state_dict()


# Copies


@programs()
def averages_in_the_main_program(on: Runner) -> Any:
    training = Training(on)
    average = swa_utils.AveragedModel(
        training.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    own = copy.deepcopy(training.model)
    for _ in range(3):
        training.run(1)
        average.update_parameters(training.model)
        with torch.no_grad():
            for slow, fast in zip(own.parameters(), training.model.parameters(), strict=True):
                slow.lerp_(fast, 0.25)
    return training.found(), average.module.state_dict(), own.state_dict()


@programs()
def copy_of_a_model_is_another(on: Runner) -> Any:
    training = Training(on)
    training.run()
    first = copy.deepcopy(training.model)
    with on.scope():
        second = copy.deepcopy(training.model)
    training.run()
    kept = training.found(), first.state_dict(), {name: each.clone() for name, each in second.state_dict().items()}
    training.model = second
    with on.scope():
        training.optimizer = training.kind(second.parameters())
    training.run()
    return kept, training.found(), first.state_dict()


@programs()
def backup_is_loaded_after_the_copy_was_trained(on: Runner) -> Any:
    training = Training(on)
    training.run()
    backup = {name: each.detach().clone() for name, each in training.model.state_dict().items()}
    shared = {name: each.detach() for name, each in training.model.state_dict().items()}
    training.run()
    now = {name: each.clone() for name, each in shared.items()}
    training.model.load_state_dict(backup)
    training.run()
    return now, training.found()


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
