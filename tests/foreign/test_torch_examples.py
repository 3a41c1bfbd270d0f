"""PyTorch's examples, tutorials and tests of data parallelism, written again in small and without random numbers."""

import collections
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from tests.foreign.parts import classify, images, made, mlp, vectors
from tests.foreign.programs import SELDOM, Program, Programs, Runner

programs = Programs(seldom=SELDOM)


# Examples


@programs(seldom=())
def mnist(on: Runner) -> Any:
    def net() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(dim=1)),
        )

    model, optimizer = made(on, net, optimizer=torch.optim.Adadelta)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    trained = classify(on, model, optimizer, images(), after=scheduler.step)

    def test(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model.eval()
        with torch.no_grad():
            output = model(x)
        return functional.nll_loss(output, y, reduction="sum"), (output.argmax(dim=1) == y).sum()

    return trained, on.sum(on(test, *images(5)))


@programs(seldom=(), linear=True, tolerance=1e-5)
def recurrent_language_model(on: Runner) -> Any:
    """Truncated back-propagation: the state goes from batch to batch, with its rows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.rnn, self.decoder = (
                nn.Embedding(11, 4),
                nn.LSTM(4, 6, batch_first=True),
                nn.Linear(6, 11),
            )

        def forward(self, x: torch.Tensor, state: Any) -> Any:
            output, state = self.rnn(self.encoder(x), state)
            return self.decoder(output), state

    model, optimizer = made(on, Model)

    def step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        optimizer.zero_grad()
        scores, (h, c) = model(x[:, :-1], (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        loss = functional.cross_entropy(scores.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss, h.transpose(0, 1).detach(), c.transpose(0, 1).detach()

    text = torch.arange(6 * 15).view(6, 15) * 7 % 11
    h = c = torch.zeros(6, 1, 6)
    losses = []
    for start in range(0, 15, 5):
        loss, h, c = on(step, text[:, start : start + 5], h, c)
        losses.append(on.mean(loss))
        h, c = on.rows(h), on.rows(c)
    return losses, h, dict(model.named_parameters())


@programs()
def autoencoder(on: Runner) -> Any:
    encoder, decoder, optimizer = made(
        on, lambda: nn.Linear(4, 2), lambda: nn.Linear(2, 4), optimizer=torch.optim.AdamW
    )

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        hidden = encoder(x)
        losses = {"rebuilt": functional.mse_loss(decoder(hidden), x), "small": hidden.square().sum(dim=1).mean()}
        sum(losses.values()).backward()
        optimizer.step()
        return losses

    losses = [on(step, vectors()[0]) for _ in range(2)]
    return [{key: on.mean(value) for key, value in each.items()} for each in losses], encoder.weight, decoder.weight


@programs(linear=True)
def super_resolution(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2)))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(functional.avg_pool2d(x, 2)), x)
        loss.backward()
        optimizer.step()
        return loss

    return on.mean(on(step, images(5)[0])), dict(model.named_parameters())


@programs(linear=True)
def siamese_triplets(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Linear(4, 3))

    def step(anchor: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.triplet_margin_loss(model(anchor), model(near), model(far))
        loss.backward()
        optimizer.step()
        return loss

    x, _ = vectors()
    return on.mean(on(step, x, x + 0.1, -x)), model.weight


@programs()
def policy_gradient(on: Runner) -> Any:
    model, optimizer = made(on, mlp, optimizer=torch.optim.Adam)

    def step(states: torch.Tensor, actions: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        chosen = torch.distributions.Categorical(logits=model(states))
        loss = -(chosen.log_prob(actions) * returns).mean()
        loss.backward()
        optimizer.step()
        return chosen.entropy()

    x, y = vectors()
    return on.rows(on(step, x, y, torch.linspace(-1, 1, 7))), dict(model.named_parameters())


@programs(linear=True)
def distillation(on: Runner) -> Any:
    teacher, student, _ = made(on, mlp, mlp)
    with on.scope():
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    teacher.eval().requires_grad_(False)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = functional.softmax(teacher(x) / 2, dim=1)
        scores = student(x)
        soft = functional.kl_div(functional.log_softmax(scores / 2, dim=1), wanted, reduction="batchmean")
        loss = 0.3 * functional.cross_entropy(scores, y) + 0.7 * 4 * soft
        loss.backward()
        optimizer.step()
        return loss

    return on.mean(on(step, *vectors())), dict(student.named_parameters()), dict(teacher.named_parameters())


@programs(seldom=(), linear=True)
def transfer_learning(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = mlp()
        for parameter in model.parameters():
            parameter.requires_grad = False
        model[2] = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    first = classify(on, model, optimizer, vectors())
    model.requires_grad_()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    return first, classify(on, model, optimizer, vectors())


@programs(tolerance=1e-5)
def transformer(on: Runner) -> Any:
    def net() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    model, head, optimizer = made(on, net, lambda: nn.Linear(8, 3), optimizer=torch.optim.AdamW)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        loss = functional.cross_entropy(head(model(x, mask=mask)).mean(dim=1), y)
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1))
    return [on.mean(on(step, x, torch.arange(5) % 3)) for _ in range(2)], head.weight


@programs()
def cosine_schedule_with_warm_up(on: Runner) -> Any:
    model, optimizer = made(on, mlp, optimizer=torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 2) * (0.5 + 0.5 * math.cos(step / 4))
    )
    return classify(on, model, optimizer, vectors(), 3, scheduler.step), scheduler.get_last_lr()


@programs(linear=True)
def schedule_by_the_loss(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    losses = []
    for _ in range(3):
        (loss,), weights, _ = classify(on, model, optimizer, vectors(), 1)
        scheduler.step(loss.detach())
        losses.append(loss)
    return losses, weights, optimizer.param_groups[0]["lr"]


@programs(linear=True)
def moving_average_of_weights(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    average = {name: each.detach().clone() for name, each in model.named_parameters()}

    def follow() -> None:
        for name, each in model.named_parameters():
            average[name].lerp_(each.detach(), 0.5)

    return classify(on, model, optimizer, vectors(), 3, follow), average


@programs(linear=True)
def stochastic_weight_averaging(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    with on.scope():
        averaged = swa_utils.AveragedModel(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.01)

    def follow() -> None:
        averaged.update_parameters(model)
        scheduler.step()

    trained = classify(on, model, optimizer, vectors(), 3, follow)
    return trained, dict(averaged.module.named_parameters())


# Loops


@programs(linear=True)
def accumulation_over_small_batches(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        if number == 0:
            optimizer.zero_grad()
        (functional.cross_entropy(model(x), y) / 3).backward()
        if number == 2:
            optimizer.step()

    for number in range(6):
        on(step, *vectors(), number=number % 3)
    return dict(model.named_parameters())


@programs(linear=True)
def gradients_kept_as_zeros(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(3):
        on(step, *vectors())
    return dict(model.named_parameters()), [each.grad for each in model.parameters()]


@programs()
def scaled_gradients(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    with on.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        on(step, *vectors())
    return dict(model.named_parameters()), scaler.get_scale()


@programs(linear=True, tolerance=2e-2)
def bfloat16_by_autocast(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(seldom=())
def every_optimizer(on: Runner) -> Any:
    found = {}
    kinds: list[Any] = [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.ASGD),
        *(torch.optim.Rprop, torch.optim.Adafactor),
    ]
    for kind in kinds:
        model, optimizer = made(on, lambda: nn.Linear(4, 3), optimizer=kind)
        found[kind.__name__] = classify(on, model, optimizer, vectors(6))[1]
    return found


# Tests of DistributedDataParallel


@programs(linear=True)
def weights_that_are_shared(on: Runner) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x))

    model, optimizer = made(on, Tied)
    numbers = torch.tensor([0, 1, 5, 8, 2, 3, 3])
    return classify(on, model, optimizer, (numbers, (numbers + 1) % 9))


@programs(linear=True)
def outputs_in_a_nesting(on: Runner) -> Any:
    Pair = collections.namedtuple("Pair", ["scores", "hidden"])

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            hidden = self.body(x)
            return {"pair": Pair(self.head(hidden), hidden), "many": [hidden, (hidden, hidden.sum())]}

    model, optimizer = made(on, Two)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        output = model(x)
        (functional.cross_entropy(output["pair"].scores, y) + output["many"][1][0].square().mean()).backward()
        optimizer.step()
        return output["many"][0]

    return on.rows(on(step, *vectors())), dict(model.named_parameters())


@programs(linear=True)
def two_passes_of_one_output(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        output = model(x)
        functional.cross_entropy(output, y).backward(retain_graph=True)
        output.square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs(seldom=(), linear=True)
def layers_that_some_steps_leave_out(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, chosen: int) -> None:
        optimizer.zero_grad()
        layers[2](layers[chosen](x)).square().mean().backward()
        optimizer.step()

    for number in range(4):
        on(step, vectors()[0], chosen=number % 2)
    return dict(layers.named_parameters())


@programs(seldom=())
def layers_by_the_rows_of_a_replica(on: Runner) -> Any:
    """Experts: which parameters a replica uses depends on its rows."""
    with on.scope():
        torch.manual_seed(3)
        experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        optimizer = torch.optim.Adam(experts.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores = torch.stack([experts[int(kind)](row) for row, kind in zip(x, y, strict=True)])
        scores.square().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors(6))
    return dict(experts.named_parameters())


@programs(linear=True)
def recomputed_activations(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for reentrant in (False, True):
            hidden = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
            functional.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs(seldom=(), linear=True)
def complex_parameters(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (x.to(torch.complex64) @ weight).abs().mean().backward()
        optimizer.step()

    for _ in range(2):
        on(step, vectors()[0])
    return weight


@programs(seldom=(), linear=True)
def parameters_of_several_types(on: Runner) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).double())

    model, optimizer = made(on, Mixed)
    return classify(on, model, optimizer, vectors())


@programs(linear=True)
def channels_last(on: Runner) -> Any:
    def net() -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return layers.to(memory_format=torch.channels_last)

    model, optimizer = made(on, net)
    x, y = images()
    return classify(on, model, optimizer, (x.to(memory_format=torch.channels_last), y))


@programs(linear=True)
def frozen_then_thawed(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    model[0].requires_grad_(False)
    first = classify(on, model, optimizer, vectors())
    model[0].requires_grad_()
    return first, classify(on, model, optimizer, vectors())


@programs()
def saved_and_resumed(on: Runner) -> Any:
    model, optimizer = made(on, mlp, optimizer=torch.optim.Adam)
    classify(on, model, optimizer, vectors())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other, its_optimizer = made(on, mlp, optimizer=torch.optim.Adam)
    other.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    return classify(on, other, its_optimizer, vectors())


@programs(linear=True)
def statistics_of_fixed_batch_norm(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    model[1].eval()
    return classify(on, model, optimizer, vectors())


@programs(linear=True)
def evaluation_under_inference_mode(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    classify(on, model, optimizer, vectors())

    def test(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.inference_mode():
            scores = model(x)
            return scores, (scores.argmax(dim=1) == y).float().mean()

    scores, accuracy = on(test, *vectors(5))
    return on.rows(scores), on.mean(accuracy)


@programs(linear=True)
def one_row(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    return classify(on, model, optimizer, vectors(1))


@programs(linear=True)
def update_without_an_optimizer(on: Runner) -> Any:
    (model, _) = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)

    for _ in range(2):
        on(step, *vectors())
    return dict(model.named_parameters())


@programs(linear=True)
def penalties_of_weights(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        penalty = sum(each.abs().sum() for each in model.parameters())
        loss = functional.cross_entropy(model(x), y) + 0.01 * penalty
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
