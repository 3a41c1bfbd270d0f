"""PyTorch's tutorials and example programs, written again in small and without random numbers."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, rnn

import stratagem as sg
from tests.foreign.parts import classify, images, made, mlp, vectors, weights
from tests.foreign.programs import SELDOM, Program, Programs, Runner

programs = Programs(seldom=SELDOM)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


# Text and sequences


@programs(linear=True, tolerance=1e-5)
def names_by_characters(on: Runner) -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(5 + 6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = self.hidden(torch.cat((x, state), dim=1)).tanh()
            return functional.log_softmax(self.out(state), dim=1), state

    model, _ = made(on, Cell)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        state = torch.zeros(len(x), 6)
        for position in range(x.shape[1]):
            output, state = model(functional.one_hot(x[:, position], 5).float(), state)
        loss = functional.nll_loss(output, y)
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.05)
        return loss

    x = torch.arange(7 * 4).view(7, 4) * 3 % 5
    return [on.mean(on(step, x, torch.arange(7) % 3)) for _ in range(3)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def translation_with_attention(on: Runner) -> Any:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.rnn(self.table(x))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.out = nn.Embedding(9, 6), nn.GRUCell(12, 6), nn.Linear(6, 9)

        def forward(self, word: torch.Tensor, state: torch.Tensor, memory: torch.Tensor) -> Any:
            chosen = torch.softmax((memory @ state.unsqueeze(2)).squeeze(2), dim=1)
            seen = (chosen.unsqueeze(1) @ memory).squeeze(1)
            state = self.rnn(torch.cat((self.table(word), seen), dim=1), state)
            return self.out(state), state

    encoder, decoder, optimizer = made(on, Encoder, Decoder, optimizer=torch.optim.Adam)

    def step(x: torch.Tensor, y: torch.Tensor, forced: bool) -> torch.Tensor:
        optimizer.zero_grad()
        memory, state = encoder(x)
        state, word, losses = state[0], torch.zeros(len(x), dtype=torch.int64), []
        for position in range(y.shape[1]):
            scores, state = decoder(word, state, memory)
            losses.append(functional.cross_entropy(scores, y[:, position]))
            word = y[:, position] if forced else scores.argmax(dim=1)
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.arange(7 * 4).view(7, 4) * 5 % 9
    losses = [on.mean(on(step, x, x.flip(1), forced=forced)) for forced in (True, False, True)]
    return losses, dict(encoder.named_parameters()), dict(decoder.named_parameters())


@programs(tolerance=1e-5)
def greedy_and_beam_search(on: Runner) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.rnn, self.out = nn.Embedding(7, 5), nn.GRUCell(5, 5), nn.Linear(5, 7)

        def forward(self, word: torch.Tensor, state: torch.Tensor) -> Any:
            state = self.rnn(self.table(word), state)
            return functional.log_softmax(self.out(state), dim=1), state

    (model, _) = made(on, Model)

    @torch.no_grad()
    def search(first: torch.Tensor, width: int) -> Any:
        found = []
        for word in first:
            beams = [(0.0, [int(word)], torch.zeros(1, 5))]
            for _ in range(3):
                longer = []
                for score, words, before in beams:
                    scores, state = model(torch.tensor(words[-1:]), before)
                    best, ids = scores[0].topk(width)
                    longer += [
                        (score + float(each), [*words, int(next_)], state)
                        for each, next_ in zip(best, ids, strict=True)
                    ]
                beams = sorted(longer, key=lambda each: -each[0])[:width]
            found.append(torch.tensor(beams[0][1]))
        return torch.stack(found)

    return [on.rows(on(search, torch.arange(7), width=width)) for width in (1, 3)]


@programs(linear=True, tolerance=1e-5)
def packed_sequences(on: Runner) -> Any:
    model, head, optimizer = made(on, lambda: nn.LSTM(4, 5, batch_first=True), lambda: nn.Linear(5, 3))

    def step(x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = model(packed)
        loss = functional.cross_entropy(head(state[0]), y)
        loss.backward()
        optimizer.step()
        return loss

    lengths = torch.tensor([5, 2, 4, 1, 3, 5, 2])
    return [on.mean(on(step, numbers(7, 5, 4), lengths, torch.arange(7) % 3)) for _ in range(2)], head.weight


@programs(linear=True, tolerance=1e-5)
def connectionist_temporal_classification(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Linear(4, 5))

    def step(x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = functional.log_softmax(model(x), dim=2).transpose(0, 1)
        each = functional.ctc_loss(scores, targets, torch.full((len(x),), 6), lengths, reduction="none")
        loss = (each / lengths).mean()
        loss.backward()
        optimizer.step()
        return loss

    targets = torch.arange(7 * 2).view(7, 2) % 4 + 1
    return [on.mean(on(step, numbers(7, 6, 4), targets, 1 + torch.arange(7) % 2)) for _ in range(2)], model.weight


@programs(linear=True)
def text_classified_by_bags(on: Runner) -> Any:
    bag, head, optimizer = made(on, lambda: nn.EmbeddingBag(20, 4), lambda: nn.Linear(4, 3))

    def step(words: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(head(bag(words) * weight), y)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1e6)
        optimizer.step()
        return loss

    words = torch.arange(7 * 5).view(7, 5) * 3 % 20
    return [on.mean(on(step, words, torch.ones(7, 1), torch.arange(7) % 3)) for _ in range(2)], dict(
        head.named_parameters()
    )


@programs(tolerance=1e-4)
def waves_predicted_by_lbfgs(on: Runner) -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.LSTMCell(1, 3), nn.LSTMCell(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = [(x.new_zeros(len(x), 3), x.new_zeros(len(x), 3)) for _ in range(2)]
            found = []
            for value in x.split(1, dim=1):
                states[0] = self.first(value, states[0])
                states[1] = self.second(states[0][0], states[1])
                found.append(self.out(states[1][0]))
            return torch.cat(found, dim=1)

    with on.scope():
        torch.manual_seed(3)
        model = Two().double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def step(x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x[:, :-1]), x[:, 1:])
            loss.backward()
            return loss

        return optimizer.step(closure)

    waves = torch.sin(torch.arange(7 * 6, dtype=torch.float64).view(7, 6) / 3)
    return [on.mean(on(step, waves)) for _ in range(2)], dict(model.named_parameters())


# Pictures


@programs(tolerance=2e-5)
def dcgan(on: Runner) -> Any:
    def maker() -> nn.Module:
        layers = nn.Sequential(
            *(nn.ConvTranspose2d(3, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.ConvTranspose2d(4, 1, 2, 2, bias=False), nn.Tanh()),
        )
        return layers if on.strategy is None else sg.convert_sync_batchnorm(layers)

    def judge() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16, 1), nn.Sigmoid())

    def initialize(module: nn.Module) -> None:
        kind = type(module).__name__
        if "Conv" in kind:
            nn.init.normal_(module.weight.data, 0.0, 0.2)
        elif "BatchNorm" in kind:
            nn.init.constant_(module.bias.data, 0.1)

    with on.scope():
        torch.manual_seed(3)
        made_by, judged_by = maker(), judge()
        made_by.apply(initialize)
        judged_by.apply(initialize)
        of_maker = torch.optim.Adam(made_by.parameters(), lr=0.01, betas=(0.5, 0.999))
        of_judge = torch.optim.Adam(judged_by.parameters(), lr=0.01, betas=(0.5, 0.999))

    def step(real: torch.Tensor, noise: torch.Tensor) -> Any:
        judged_by.zero_grad()
        functional.binary_cross_entropy(judged_by(real).view(-1), torch.ones(len(real))).backward()
        fake = made_by(noise)
        functional.binary_cross_entropy(judged_by(fake.detach()).view(-1), torch.zeros(len(real))).backward()
        of_judge.step()
        made_by.zero_grad()
        loss = functional.binary_cross_entropy(judged_by(fake).view(-1), torch.ones(len(real)))
        loss.backward()
        of_maker.step()
        return loss

    losses = [on.mean(on(step, images(7, 4)[0], numbers(7, 3, 1, 1))) for _ in range(2)]
    return losses, weights(made_by), dict(judged_by.named_parameters())


@programs(linear=True)
def a_picture_as_the_parameter(on: Runner) -> Any:
    """Neural transfer: what is trained is the input."""
    with on.scope():
        torch.manual_seed(3)
        features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).requires_grad_(False).eval()
        picture = nn.Parameter(torch.rand(1, 1, 6, 6))
        optimizer = torch.optim.SGD([picture], lr=0.5)

    def gram(maps: torch.Tensor) -> torch.Tensor:
        flat = maps.flatten(2)
        return flat @ flat.transpose(1, 2) / flat[0].numel()

    def step(style: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = gram(features(style))
        optimizer.zero_grad()
        loss = (gram(features(picture)) - wanted).square().sum(dim=(1, 2)).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, images(5, 6)[0])) for _ in range(2)], picture


@programs(tolerance=1e-5)
def fast_style(on: Runner) -> Any:
    def net() -> nn.Module:
        return nn.Sequential(
            *(nn.ReflectionPad2d(1), nn.Conv2d(1, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
            *(nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 3, 2, 1)),
        )

    model, optimizer = made(on, net, optimizer=torch.optim.Adam)
    with on.scope():
        torch.manual_seed(4)
        judge = nn.Conv2d(1, 3, 3).requires_grad_(False)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(judge(model(x)), judge(x))
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, images(7)[0])) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def spatial_transformer(on: Runner) -> Any:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where, self.out = nn.Linear(64, 6), nn.Linear(64, 3)
            self.where.weight.data.zero_()
            self.where.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grid = functional.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
            return self.out(functional.grid_sample(x, grid, align_corners=False).flatten(1))

    model, optimizer = made(on, Turning)
    return classify(on, model, optimizer, images(7))


@programs(linear=True)
def variational_autoencoder(on: Runner) -> Any:
    encoder, decoder, optimizer = made(on, lambda: nn.Linear(4, 4), lambda: nn.Linear(2, 4))

    def step(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        mean, log_variance = encoder(x).chunk(2, dim=1)
        rebuilt = decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
        loss = (functional.mse_loss(rebuilt, x, reduction="none").sum(dim=1) + divergence).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0], numbers(7, 2))) for _ in range(2)], encoder.weight, decoder.weight


# Reinforcement learning


@programs(tolerance=1e-5)
def actor_and_critic(on: Runner) -> Any:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.action, self.value = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.body(x).relu()
            return functional.softmax(self.action(hidden), dim=-1), self.value(hidden)

    model, optimizer = made(on, Policy, optimizer=torch.optim.Adam)

    def step(states: torch.Tensor, actions: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        chances, values = model(states)
        chosen = torch.distributions.Categorical(chances)
        advantage = returns - values.squeeze(-1).detach()
        loss = (-chosen.log_prob(actions) * advantage - 0.01 * chosen.entropy()).mean()
        loss = loss + functional.smooth_l1_loss(values.squeeze(-1), returns)
        loss.backward()
        optimizer.step()
        return loss

    batch = vectors()[0], torch.arange(7) % 2, torch.linspace(-1, 1, 7)
    return [on.mean(on(step, *batch)) for _ in range(2)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def q_learning_with_a_target(on: Runner) -> Any:
    policy, target, _ = made(on, mlp, mlp)
    target.load_state_dict(policy.state_dict())
    with on.scope():
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, amsgrad=True)

    def step(state: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        values = policy(state).gather(1, action[:, None])
        with torch.no_grad():
            wanted = reward + 0.9 * target(after).max(dim=1).values
        loss = functional.smooth_l1_loss(values, wanted[:, None])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 0.05)
        optimizer.step()
        return loss

    losses = []
    for _ in range(3):
        x, y = vectors()
        losses.append(on.mean(on(step, x, y, torch.linspace(0, 1, 7), x.flip(0))))
        slow, fast = target.state_dict(), policy.state_dict()
        for key in fast:
            slow[key] = fast[key] * 0.1 + slow[key] * 0.9
        target.load_state_dict(slow)
    return losses, dict(policy.named_parameters()), dict(target.named_parameters())


# Graphs


@programs(linear=True, tolerance=1e-5)
def graph_attention(on: Runner) -> Any:
    """A batch of graphs with the same nodes; the edges are the same for all."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.score = nn.Linear(4, 5, bias=False), nn.Parameter(torch.randn(10) / 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            hidden = self.map(x)
            scores = (hidden @ self.score[:5])[:, :, None] + (hidden @ self.score[5:])[:, None]
            chosen = functional.leaky_relu(scores).masked_fill(edges == 0, -1e9).softmax(dim=2)
            return functional.elu(chosen @ hidden)

    model, head, optimizer = made(on, Attention, lambda: nn.Linear(5, 3))

    def step(x: torch.Tensor, y: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(head(model(x, edges).mean(dim=1)), y)
        loss.backward()
        optimizer.step()
        return loss

    edges = torch.eye(6) + torch.eye(6).roll(1, 0)
    return [on.mean(on(step, numbers(7, 6, 4), torch.arange(7) % 3, edges=edges)) for _ in range(2)], dict(
        model.named_parameters()
    )


# Functions of functions


@programs(tolerance=1e-5)
def gradients_of_each_sample(on: Runner) -> Any:
    """Clipped one by one, as private training does."""
    model, optimizer = made(on, lambda: nn.Linear(4, 3))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parameters = {name: each.detach() for name, each in model.named_parameters()}

        def loss(own: dict[str, torch.Tensor], row: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(torch.func.functional_call(model, own, (row[None],)), kind[None])

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        for name, each in found.items():
            factor = (0.5 / norms).clamp(max=1.0).view(-1, *[1] * (each.dim() - 1))
            model.get_parameter(name).grad = (each * factor).mean(dim=0)
        optimizer.step()
        return norms

    return [on.rows(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def jacobians_and_hessians(on: Runner) -> Any:
    (model, _) = made(on, lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))

    def step(x: torch.Tensor) -> Any:
        jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
        hessian = torch.func.vmap(torch.func.hessian(lambda row: model(row).square().sum()))(x)
        _, product = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return jacobian, hessian, product

    return [on.rows(each) for each in on(step, vectors()[0])]


@programs(tolerance=1e-5)
def an_ensemble_in_one_call(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        models = [mlp() for _ in range(3)]

    def step(x: torch.Tensor) -> torch.Tensor:
        parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]

        def call(own: Any, others: Any, rows: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(models[0], (own, others), (rows,))

        return torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x).mean(dim=0).detach()

    return on.rows(on(step, vectors()[0]))


class Legendre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 0.5 * (5 * x**3 - 3 * x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 1.5 * (5 * x**2 - 1)


@programs(linear=True, tolerance=1e-5)
def a_function_with_its_own_backward(on: Runner) -> Any:
    with on.scope():
        factors = nn.ParameterList(nn.Parameter(torch.tensor(value)) for value in (0.1, -0.3, 0.2, 0.05))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b, c, d = factors
        loss = (a + b * Legendre.apply(c + d * x) - y).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in factors:
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
        return loss

    x = torch.linspace(-math.pi, math.pi, 11)
    return [on.mean(on(step, x, x.sin())) for _ in range(3)], list(factors)


@programs(linear=True)
def a_net_that_uses_a_layer_again(on: Runner) -> Any:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            x = self.first(x).clamp(min=0)
            for _ in range(times):
                x = self.middle(x).clamp(min=0)
            return self.last(x)

    model, optimizer = made(on, Dynamic)

    def step(x: torch.Tensor, y: torch.Tensor, times: int) -> torch.Tensor:
        loss = functional.cross_entropy(model(x, times), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors(), times=times)) for times in (3, 0, 2)], dict(model.named_parameters())


# Parametrizations


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


@programs(linear=True, tolerance=1e-5)
def parametrized_weights(on: Runner) -> Any:
    def net() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        parametrizations.weight_norm(model[1])
        parametrizations.orthogonal(model[2])
        return model

    model, optimizer = made(on, net)
    first = classify(on, model, optimizer, vectors(), 2)
    return first, model[0].weight, model[2].weight


@programs(linear=True, tolerance=1e-5)
def parametrization_cached_and_removed(on: Runner) -> Any:
    def net() -> nn.Module:
        layer = nn.Linear(4, 4)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return nn.Sequential(layer, nn.Linear(4, 3))

    model, optimizer = made(on, net)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with parametrize.cached():
            loss = functional.cross_entropy(model(x) + model[1](model[0](2 * x)), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [on.mean(on(step, *vectors())) for _ in range(2)]
    model[0].weight = torch.eye(4)
    losses.append(on.mean(on(step, *vectors())))
    return losses, dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def pruned_weights(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    first = classify(on, model, optimizer, vectors())
    with on.scope():
        prune.l1_unstructured(model[0], name="weight", amount=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = classify(on, model, optimizer, vectors())
    return first[0], second, model[0].weight


@programs(tolerance=1e-4)
def spectral_norm(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 3)))
    return classify(on, model, optimizer, vectors(), 3)


# Losses, rates, loops


@programs(linear=True)
def mixup_and_smooth_labels(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, other: torch.Tensor, y: torch.Tensor, z: torch.Tensor, part: float) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(part * x + (1 - part) * other)
        loss = functional.cross_entropy(scores, y, label_smoothing=0.1) * part
        loss = loss + functional.cross_entropy(scores, z, label_smoothing=0.1) * (1 - part)
        loss.backward()
        optimizer.step()
        return loss

    x, y = vectors()
    losses = [on.mean(on(step, x, x.flip(0), y, y.flip(0), part=part)) for part in (0.3, 0.8)]
    return losses, dict(model.named_parameters())


@programs()
def rates_of_one_cycle(on: Runner) -> Any:
    model, optimizer = made(on, mlp, optimizer=torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    return (
        classify(on, model, optimizer, vectors(), 4, scheduler.step),
        scheduler.get_last_lr(),
        optimizer.param_groups[0]["betas"],
    )


@programs(linear=True)
def rates_one_after_the_other(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    schedulers = torch.optim.lr_scheduler
    scheduler = schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingWarmRestarts(optimizer, 2)],
        milestones=[2],
    )
    return classify(on, model, optimizer, vectors(), 5, scheduler.step), scheduler.get_last_lr()


@programs()
def groups_with_options_of_their_own(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        decayed = [each for name, each in model.named_parameters() if each.dim() > 1]
        others = [each for name, each in model.named_parameters() if each.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.2}], lr=0.05
        )

    def change() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    return classify(on, model, optimizer, vectors(), 3, change)


@programs(linear=True)
def one_optimizer_over_two_chained_models(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        forth, back = nn.Linear(4, 2), nn.Linear(2, 4)
        optimizer = torch.optim.SGD(
            itertools.chain(forth.parameters(), back.parameters()), lr=0.1, nesterov=True, momentum=0.9
        )

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.l1_loss(back(forth(x)), x)
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0])) for _ in range(3)], forth.weight, back.weight


@programs(linear=True)
def early_stopping(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    best, best_loss, patience, history = None, math.inf, 0, []

    def test(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return functional.cross_entropy(model(x), y)

    for _ in range(6):
        classify(on, model, optimizer, vectors(), 1)
        loss = float(on.mean(on(test, -vectors(5)[0], vectors(5)[1])))
        history.append(loss)
        if loss < best_loss:
            best, best_loss, patience = {key: each.clone() for key, each in model.state_dict().items()}, loss, 0
        elif (patience := patience + 1) == 2:
            break
    model.load_state_dict(best)
    return history, dict(model.named_parameters())


@programs(linear=True)
def epochs_over_a_loader(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    x, y = vectors(20)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        scores = model(x)
        loss = functional.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        return loss.detach() * len(x), (scores.argmax(dim=1) == y).sum()

    history = []
    for _ in range(2):
        total, right = 0.0, 0
        for batch in loader:
            loss, correct = on(step, *batch)
            total += float(on.sum(loss))
            right += int(on.sum(correct))
        history.append((total / 20, right))
    return history, dict(model.named_parameters())


@programs(linear=True)
def layers_trained_one_by_one(on: Runner) -> Any:
    """Forward-forward: each layer has its own loss and its own optimizer, and passes on no gradient."""
    with on.scope():
        torch.manual_seed(3)
        layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in layers]

    def step(good: torch.Tensor, bad: torch.Tensor) -> None:
        for layer, optimizer in zip(layers, optimizers, strict=True):
            good = layer(good / good.norm(dim=1, keepdim=True)).relu()
            bad = layer(bad / bad.norm(dim=1, keepdim=True)).relu()
            gap = torch.cat([2 - good.square().mean(dim=1), bad.square().mean(dim=1) - 2])
            loss = functional.softplus(gap).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            good, bad = good.detach(), bad.detach()

    x, _ = vectors()
    on(step, x, x.flip(1))
    return dict(layers.named_parameters())


@programs(tolerance=1e-5)
def distillation_of_hidden_states(on: Runner) -> Any:
    teacher, student, fit, _ = made(on, mlp, mlp, lambda: nn.Linear(8, 8))
    teacher.requires_grad_(False)
    with on.scope():
        optimizer = torch.optim.Adam([*student.parameters(), *fit.parameters()], lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = student[:2](x)
        with torch.no_grad():
            wanted = teacher[:2](x)
        near = functional.cosine_embedding_loss(fit(hidden), wanted, torch.ones(len(x)))
        loss = functional.cross_entropy(student[2](hidden), y) + near
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(2)], weights(student, fit)


@programs(tolerance=3e-2)
def autocast_with_accumulation(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    with on.scope():
        scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return [on.mean(on(step, *vectors(), number=number)) for number in range(4)], dict(model.named_parameters())


@programs(linear=True)
def warm_start_from_another_model(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    for parameter in other.parameters():
        nn.init.constant_(parameter, 0.1)
    fitting = {key: each for key, each in other.state_dict().items() if each.shape == model.state_dict()[key].shape}
    model.load_state_dict(fitting, strict=False)
    nn.init.xavier_uniform_(model[2].weight, generator=torch.Generator().manual_seed(6))
    return classify(on, model, optimizer, vectors())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode uses it
@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
