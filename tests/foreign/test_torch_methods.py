"""Methods of papers, as people write them in PyTorch, in small and without random numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stratagem as sg
from tests.foreign.parts import classify, gathered, made, mlp, summed, vectors, weights
from tests.foreign.programs import SELDOM, Program, Programs, Runner

programs = Programs(seldom=SELDOM)


def embedder() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        one.mul_(1 - rate).add_(other, alpha=rate)


# Losses over pairs of rows


@programs(tolerance=1e-5, seldom=())
def simclr(on: Runner) -> Any:
    model, optimizer = made(on, embedder, optimizer=torch.optim.Adam)

    def step(x: torch.Tensor, other: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        one, two = (functional.normalize(model(each), dim=1) for each in (x, other))
        ones, twos = gathered(on, one), gathered(on, two)
        scores = torch.cat([one @ twos.T, one @ ones.T - 1e9 * functional.one_hot(numbers, len(ones))], dim=1) / 0.5
        loss = functional.cross_entropy(scores, numbers)
        loss.backward()
        optimizer.step()
        return loss

    x, _ = vectors()
    return [on.mean(on(step, x, 1.1 * x.flip(1), torch.arange(7))) for _ in range(2)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def clip(on: Runner) -> Any:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text, self.scale = embedder(), embedder(), nn.Parameter(torch.tensor(1.0))

        def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return functional.normalize(self.image(image), dim=1), functional.normalize(self.text(text), dim=1)

    model, optimizer = made(on, Two, optimizer=torch.optim.AdamW)

    def step(image: torch.Tensor, text: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        one, two = model(image, text)
        of_image = model.scale.exp() * one @ gathered(on, two).T
        of_text = model.scale.exp() * two @ gathered(on, one).T
        loss = (functional.cross_entropy(of_image, numbers) + functional.cross_entropy(of_text, numbers)) / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, 1.02)
        return loss

    x, _ = vectors()
    return [on.mean(on(step, x, x.flip(1), torch.arange(7))) for _ in range(3)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def moco(on: Runner) -> Any:
    """Keys of all replicas go into a queue that each of them keeps."""

    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = embedder()
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(12, 5), dim=1))
            self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            query = functional.normalize(self.query(x), dim=1)
            with torch.no_grad():
                follow(self.key, self.query, 0.1)
                key = functional.normalize(self.key(other), dim=1)
            scores = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ self.queue.clone().T], dim=1)
            keys, place = gathered(on, key), int(self.place)
            self.queue[(place + torch.arange(len(keys))) % 12] = keys
            self.place[0] = (place + len(keys)) % 12
            return functional.cross_entropy(scores / 0.5, torch.zeros(len(x), dtype=torch.int64))

    model, optimizer = made(on, Moco)

    def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, other)
        loss.backward()
        optimizer.step()
        return loss

    x, _ = vectors()
    return [on.mean(on(step, x, x.flip(1))) for _ in range(3)], weights(model)


@programs(tolerance=1e-5)
def barlow_twins(on: Runner) -> Any:
    """A loss of sums over all rows, the same in every replica."""
    model, optimizer = made(on, embedder)

    def step(x: torch.Tensor, other: torch.Tensor, num_rows: int) -> torch.Tensor:
        optimizer.zero_grad()
        one, two = model(x), model(other)
        correlation = summed(on, one.T @ two) / num_rows
        loss = (correlation - torch.eye(5)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    x, _ = vectors()
    return [on.first(on(step, x, x.flip(1), num_rows=7)) for _ in range(2)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def centers_of_kinds(on: Runner) -> Any:
    """ArcFace with a center loss: margins by target, and a second optimizer for the centers."""
    with on.scope():
        torch.manual_seed(3)
        model, weight, centers = embedder(), nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3, 5))
        optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.05, momentum=0.9, weight_decay=1e-3)
        of_centers = torch.optim.SGD([centers], lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model(x)
        cosine = functional.normalize(hidden, dim=1) @ functional.normalize(weight, dim=1).T
        margin = torch.cos(torch.acos(cosine.clamp(-0.99, 0.99)) + 0.2)
        is_target = functional.one_hot(y, 3).bool()
        loss = functional.cross_entropy(4 * torch.where(is_target, margin, cosine), y)
        loss = loss + 0.1 * (hidden - centers[y]).square().sum(dim=1).mean()
        optimizer.zero_grad()
        of_centers.zero_grad()
        loss.backward()
        for parameter in (centers,):
            parameter.grad.data *= 10.0
        optimizer.step()
        of_centers.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(3)], weight, centers


# Losses of rows


@programs(linear=True, tolerance=1e-5)
def focal_and_dice(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Linear(4, 4))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x)
        wanted = functional.one_hot(y, 4).float()
        each = functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        chance = scores.sigmoid()
        focal = ((1 - (chance * wanted + (1 - chance) * (1 - wanted))) ** 2 * each).mean()
        overlap = (chance * wanted).sum(dim=1)
        dice = 1 - (2 * overlap + 1) / (chance.sum(dim=1) + wanted.sum(dim=1) + 1)
        (focal + dice.mean()).backward()
        optimizer.step()
        return focal

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True)
def hard_rows_only(on: Runner) -> Any:
    """Rows above a loss that is the same for all: a weight for each row, not for each replica."""
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        each = functional.cross_entropy(model(x), y, reduction="none")
        (each * (each.detach() > 1.0)).mean().backward()
        optimizer.step()
        return each

    return [on.rows(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True)
def kinds_with_weights(on: Runner) -> Any:
    """Weights by class: a mean over the sum of weights, which has to be said."""
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor, by_kind: torch.Tensor) -> None:
        optimizer.zero_grad()
        if on.strategy is not None:
            sg.get_replica_context().weight(float(by_kind[y].sum()))
        functional.cross_entropy(model(x), y, weight=by_kind).backward()
        optimizer.step()

    for _ in range(2):
        on(step, *vectors(), by_kind=torch.tensor([1.0, 5.0, 0.2]))
    return dict(model.named_parameters())


@programs(tolerance=1e-5)
def weights_of_losses_that_are_learned(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        body, heads = nn.Linear(4, 6), nn.ModuleDict({"kind": nn.Linear(6, 3), "value": nn.Linear(6, 1)})
        log_variances = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in heads})
        everything = [*body.parameters(), *heads.parameters(), *log_variances.parameters()]
        optimizer = torch.optim.Adam(everything, lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        hidden = body(x).tanh()
        losses = {
            "kind": functional.cross_entropy(heads["kind"](hidden), y),
            "value": functional.mse_loss(heads["value"](hidden)[:, 0], y.float()),
        }
        total = sum(torch.exp(-log_variances[name]) * each + log_variances[name] for name, each in losses.items())
        total.backward()
        optimizer.step()
        return losses

    found = [on(step, *vectors()) for _ in range(3)]
    return [{name: on.mean(each) for name, each in one.items()} for one in found], dict(log_variances.items())


# Teachers that follow


@programs(linear=True, tolerance=1e-5)
def mean_teacher(on: Runner) -> Any:
    student, teacher, _ = made(on, mlp, mlp)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    with on.scope():
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = student(x)
        with torch.no_grad():
            wanted = teacher(0.9 * x).softmax(dim=1)
        loss = functional.cross_entropy(scores, y) + functional.mse_loss(scores.softmax(dim=1), wanted)
        loss.backward()
        optimizer.step()
        follow(teacher, student, 0.2)
        return loss

    losses = [on.mean(on(step, *vectors())) for _ in range(3)]
    return losses, dict(student.named_parameters()), dict(teacher.named_parameters())


@programs(tolerance=1e-5)
def byol(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        online, guess = embedder(), nn.Linear(5, 5)
        target = copy.deepcopy(online)
        for parameter in target.parameters():
            parameter.requires_grad = False
        optimizer = torch.optim.Adam([*online.parameters(), *guess.parameters()], lr=0.01)

    def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for one, two in ((x, other), (other, x)):
            found = functional.normalize(guess(online(one)), dim=1)
            with torch.no_grad():
                wanted = functional.normalize(target(two), dim=1)
            loss = loss + (2 - 2 * (found * wanted).sum(dim=1)).mean()
        loss.backward()
        optimizer.step()
        follow(target, online, 0.1)
        return loss

    x, _ = vectors()
    return [on.mean(on(step, x, x.flip(1))) for _ in range(3)], weights(online, guess, target)


# Optimizers


@programs(seldom=(), tolerance=1e-5, without=("central storage 3",))
def sharpness_aware(on: Runner) -> Any:
    """SAM, with a step of two passes."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: Any, base: Any, rho: float, **options: Any) -> None:
            super().__init__(parameters, {"rho": rho, **options})
            self.base = base(self.param_groups, **options)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def climb(self) -> None:
            norm = torch.norm(
                torch.stack([each.grad.norm() for group in self.param_groups for each in group["params"]])
            )
            for group in self.param_groups:
                for each in group["params"]:
                    self.state[each]["before"] = each.data.clone()
                    each.add_(each.grad * group["rho"] / (norm + 1e-12))
            self.zero_grad()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.copy_(self.state[each]["before"])
            self.base.step()
            self.zero_grad()

    with on.scope():
        torch.manual_seed(3)
        model = mlp()
        optimizer = Sam(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.climb()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(3)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def sharpness_aware_by_a_closure(on: Runner) -> Any:
    class Sam(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            closure = torch.enable_grad()(closure)
            loss = closure()
            parameters = [each for group in self.param_groups for each in group["params"]]
            norm = torch.stack([each.grad.norm() for each in parameters]).norm()
            changes = [0.05 * each.grad / norm for each in parameters]
            torch._foreach_add_(parameters, changes)
            closure()
            torch._foreach_sub_(parameters, changes)
            super().step()
            return loss

    model, optimizer = made(on, mlp, optimizer=Sam)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(tolerance=1e-5)
def lookahead(on: Runner) -> Any:
    class Lookahead:
        """Around another optimizer, as a plain class."""

        def __init__(self, base: torch.optim.Optimizer, every: int) -> None:
            self.base, self.every, self.count = base, every, 0
            self.slow = [each.detach().clone() for group in base.param_groups for each in group["params"]]

        def step(self) -> None:
            self.base.step()
            self.count += 1
            if self.count % self.every:
                return
            fast = [each for group in self.base.param_groups for each in group["params"]]
            with torch.no_grad():
                for slow, each in zip(self.slow, fast, strict=True):
                    slow.lerp_(each, 0.5)
                    each.copy_(slow)

    model, optimizer = made(on, mlp, optimizer=torch.optim.Adam)
    around = Lookahead(optimizer, 2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for number in range(4):
        losses.append(on.mean(on(step, *vectors())))
        if number % 2:  # in the main program, where it keeps its slow weights
            with torch.no_grad():
                for slow, each in zip(around.slow, model.parameters(), strict=True):
                    slow.lerp_(each, 0.5)
                    each.copy_(slow)
    return losses, dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def centralized_gradients_with_noise_given(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor, noise: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
                parameter.grad.add_(noise.mean())
        optimizer.step()

    for _ in range(2):
        on(step, *vectors(), noise=torch.linspace(0, 0.1, 5))
    return dict(model.named_parameters())


@programs(tolerance=1e-5)
def an_optimizer_with_state_of_its_own(on: Runner) -> Any:
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                first, second = group["betas"]
                for each in group["params"]:
                    if each.grad is None:
                        continue
                    state = self.state[each]
                    if not state:
                        state["average"], state["step"] = torch.zeros_like(each), 0
                    state["step"] += 1
                    each.add_((first * state["average"] + (1 - first) * each.grad).sign(), alpha=-group["lr"])
                    state["average"].mul_(second).add_(each.grad, alpha=1 - second)

    model, optimizer = made(on, mlp, optimizer=Lion)
    found = classify(on, model, optimizer, vectors(), 3)
    return found, [dict(each) for each in optimizer.state_dict()["state"].values()]


# Attacks


@programs(tolerance=1e-5)
def fast_gradient_on_the_embedding(on: Runner) -> Any:
    """FGM: weights of the embedding are moved along their gradient, and put back."""
    table, head, optimizer = made(on, lambda: nn.Embedding(10, 4), lambda: nn.Linear(4, 3))

    def step(words: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(head(table(words)), y).backward()
        before = table.weight.data.clone()
        table.weight.data.add_(0.3 * table.weight.grad / table.weight.grad.norm())
        functional.cross_entropy(head(table(words)), y).backward()
        table.weight.data = before
        optimizer.step()

    for _ in range(2):
        on(step, torch.tensor([0, 1, 5, 8, 2, 3, 3]), torch.arange(7) % 3)
    return table.weight, head.weight


@programs(linear=True, tolerance=1e-5)
def projected_gradient_attack(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            loss = functional.cross_entropy(model(x + delta), y)
            (gradient,) = torch.autograd.grad(loss, [delta])
            delta.data = (delta + 0.05 * gradient.sign()).clamp(-0.08, 0.08)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x + delta.detach()), y)
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def virtual_adversary(on: Runner) -> Any:
    model, optimizer = made(on, mlp)

    def step(x: torch.Tensor, noise: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = model(x).softmax(dim=1)
        noise = functional.normalize(noise, dim=1).requires_grad_()
        found = functional.kl_div(model(x + 0.1 * noise).log_softmax(dim=1), wanted, reduction="none").sum(dim=1)
        (direction,) = torch.autograd.grad(found.sum(), noise)
        optimizer.zero_grad()
        moved = model(x + 0.3 * functional.normalize(direction, dim=1)).log_softmax(dim=1)
        loss = functional.cross_entropy(model(x), y)
        loss = loss + functional.kl_div(moved, wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        return loss

    x, y = vectors()
    return [on.mean(on(step, x, x.flip(0), y)) for _ in range(2)], dict(model.named_parameters())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return -ctx.factor * gradient, None


@programs(linear=True)
def domains_with_reversed_gradients(on: Runner) -> Any:
    body, kind, domain, optimizer = made(on, lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 3), lambda: nn.Linear(6, 2))

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = body(x).tanh()
        loss = functional.cross_entropy(kind(hidden), y)
        loss = loss + functional.cross_entropy(domain(Reversed.apply(hidden, 0.5)), z)
        loss.backward()
        optimizer.step()
        return loss

    x, y = vectors()
    return [on.mean(on(step, x, y, y % 2)) for _ in range(2)], body.weight, domain.weight


# GANs


@programs(tolerance=1e-5)
def wasserstein_with_clipped_weights(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        maker, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(), nn.Linear(5, 1))
        of_maker = torch.optim.RMSprop(maker.parameters(), lr=0.01)
        of_critic = torch.optim.RMSprop(critic.parameters(), lr=0.01)

    def step(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            of_critic.zero_grad()
            loss = critic(maker(noise).detach()).mean() - critic(x).mean()
            loss.backward()
            of_critic.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        for parameter in critic.parameters():
            parameter.requires_grad = False
        of_maker.zero_grad()
        (-critic(maker(noise)).mean()).backward()
        of_maker.step()
        for parameter in critic.parameters():
            parameter.requires_grad = True
        return loss

    x, _ = vectors()
    return [on.mean(on(step, x, x[:, :3])) for _ in range(2)], weights(maker, critic)


@programs(tolerance=1e-5)
def penalty_of_real_rows(on: Runner) -> Any:
    """R1: the gradient of the scores by the rows, differentiated again."""
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 1)))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = functional.softplus(-scores).mean() + 5 * slope.square().sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0])) for _ in range(2)], dict(model.named_parameters())


# Learning to learn, and not to forget


@programs(tolerance=1e-5)
def maml(on: Runner) -> Any:
    """Each row is a task: an inner update by `autograd.grad`, differentiated by the outer one."""
    model, optimizer = made(on, lambda: nn.Linear(1, 1), optimizer=torch.optim.Adam)

    def step(slopes: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 4)[:, None]
        losses = []
        for slope in slopes:
            fast = dict(model.named_parameters())
            inner = functional.mse_loss(torch.func.functional_call(model, fast, (x,)), slope * x)
            found = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: each - 0.1 * change for (name, each), change in zip(fast.items(), found, strict=True)}
            losses.append(functional.mse_loss(torch.func.functional_call(model, fast, (2 * x,)), 2 * slope * x))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, torch.linspace(-2, 2, 7))) for _ in range(3)], dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def weights_held_by_what_was_important(on: Runner) -> Any:
    """EWC: squared gradients of single rows, summed by the main program, hold weights in the next task."""
    model, optimizer = made(on, lambda: nn.Linear(4, 3))
    classify(on, model, optimizer, vectors())

    def importance(x: torch.Tensor, y: torch.Tensor) -> Any:
        found = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
        for row, kind in zip(x, y, strict=True):
            loss = functional.cross_entropy(model(row[None]), kind[None])
            for name, each in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                found[name] += each.square()
        return found

    fisher = {name: on.sum(each) for name, each in on(importance, *vectors()).items()}
    before = {name: each.detach().clone() for name, each in model.named_parameters()}

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        held = sum((fisher[name] * (each - before[name]).square()).sum() for name, each in model.named_parameters())
        loss = functional.cross_entropy(model(x), y) + held
        loss.backward()
        optimizer.step()
        return loss

    x, y = vectors()
    return [on.mean(on(step, -x, y)) for _ in range(2)], fisher, dict(model.named_parameters())


# Parts of models that are trained


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@programs(tolerance=1e-5)
def low_rank_adaptation(on: Runner) -> Any:
    model, optimizer = made(on, mlp)
    first = classify(on, model, optimizer, vectors(), 1)
    with on.scope():
        torch.manual_seed(4)
        model[0], model[2] = LoRA(model[0], 2), LoRA(model[2], 2)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    second = classify(on, model, optimizer, vectors(), 3)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.base.weight += layer.up @ layer.down
            layer.up.zero_()

    def test(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return first[0], second, on.rows(on(test, vectors()[0]))


@programs(tolerance=1e-5)
def biases_and_a_prefix_only(on: Runner) -> Any:
    class Prefixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prefix = nn.ParameterList([nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(1, 4))])
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([*(each.expand(len(x), -1, -1) for each in self.prefix), x], dim=1)
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))

    with on.scope():
        torch.manual_seed(3)
        model = Prefixed()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "bias" in name or "prefix" in name
        optimizer = torch.optim.SGD(filter(lambda each: each.requires_grad, model.parameters()), lr=0.05)
    x, y = vectors(7, 12)
    return classify(on, model, optimizer, (x.view(7, 3, 4), y))


@programs(linear=True)
def layers_thawed_one_after_the_other(on: Runner) -> Any:
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)))
    model.requires_grad_(False)
    found = []
    for layer in (model[3], model[2], model[0]):
        layer.requires_grad_(True)
        found.append(classify(on, model, optimizer, vectors(), 1))
    return found


@programs(tolerance=1e-5)
def experts_with_a_gate(on: Runner) -> Any:
    """The two best experts of a row; a loss that balances them needs the rows of all."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chances = self.gate(x).softmax(dim=1)
            best, ids = chances.topk(2, dim=1)
            out = torch.zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                rows, place = (ids == number).nonzero(as_tuple=True)
                if len(rows):
                    out = out.index_add(0, rows, best[rows, place, None] * expert(x[rows]))
            return out, chances

    model, optimizer = made(on, Experts, optimizer=torch.optim.Adam)

    def step(x: torch.Tensor, y: torch.Tensor, num_rows: int) -> torch.Tensor:
        optimizer.zero_grad()
        out, chances = model(x)
        used = summed(on, chances.sum(dim=0)) / num_rows
        loss = functional.cross_entropy(out, y) + 0.1 * 4 * used.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors(), num_rows=7)) for _ in range(3)], dict(model.named_parameters())


# Quantization, flows, physics


@programs(tolerance=1e-5)
def codebook_that_follows(on: Runner) -> Any:
    """VQ-VAE: a straight-through gradient, and a codebook of moving averages over all rows."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, 3))
            self.register_buffer("counts", torch.ones(5))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.cdist(x.detach(), self.codes).argmin(dim=1)
            chosen = functional.one_hot(ids, 5).float()
            out = self.codes[ids]
            if self.training:
                self.counts.lerp_(summed(on, chosen.sum(dim=0)), 0.1)
                sums = summed(on, chosen.T @ x.detach())
                self.codes.lerp_(sums / self.counts[:, None], 0.1)
            return x + (out - x).detach(), functional.mse_loss(x, out)

    encoder, codebook, decoder, optimizer = made(on, lambda: nn.Linear(4, 3), Codebook, lambda: nn.Linear(3, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        code, near = codebook(encoder(x))
        loss = functional.mse_loss(decoder(code), x) + 0.25 * near
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0])) for _ in range(3)], weights(codebook), encoder.weight


@programs(linear=True, tolerance=1e-5)
def normalizing_flow(on: Runner) -> Any:
    def net() -> nn.Module:
        return nn.ModuleList(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))

    layers, optimizer = made(on, net)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        volume = torch.zeros(len(x))
        for layer in layers:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = layer(kept).chunk(2, dim=1)
            x = torch.cat([moved * scale.tanh().exp() + shift, kept], dim=1)
            volume = volume + scale.tanh().sum(dim=1)
        loss = (0.5 * x.square().sum(dim=1) - volume).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, vectors()[0])) for _ in range(2)], dict(layers.named_parameters())


@programs(tolerance=2e-5)
def equation_as_a_loss(on: Runner) -> Any:
    """A net that solves u'' = -u, with derivatives by its input, and a condition at the edge that all replicas have."""
    model, optimizer = made(on, lambda: nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)))

    def step(t: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        t = t.requires_grad_()
        u = model(t)
        (first,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
        edge = (model(torch.zeros(1, 1)) - 1).square().mean()
        loss = (second + u).square().mean() + edge
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, torch.linspace(0, 1, 7)[:, None])) for _ in range(3)], dict(model.named_parameters())


@programs(linear=True, tolerance=1e-5)
def filters_in_the_frequency_domain(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        kernel = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        head = nn.Linear(8, 3)
        optimizer = torch.optim.SGD([kernel, *head.parameters()], lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(head(torch.fft.irfft(torch.fft.rfft(x) * kernel, n=8)), y)
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors(7, 8))) for _ in range(2)], kernel, head.weight


@programs(linear=True, tolerance=1e-5)
def steps_of_an_ordinary_differential_equation(on: Runner) -> Any:
    field, optimizer = made(on, lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(4):
            half = x + 0.125 * field(x)
            x = x + 0.25 * field(half)
        loss = functional.cross_entropy(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return [on.mean(on(step, *vectors())) for _ in range(2)], dict(field.named_parameters())


@programs(tolerance=1e-5)
def sparse_tables_with_an_optimizer_of_their_own(on: Runner) -> Any:
    with on.scope():
        torch.manual_seed(3)
        users, items = nn.Embedding(8, 3, sparse=True), nn.EmbeddingBag(9, 3, sparse=True, mode="sum")
        bias = nn.Embedding(8, 1)
        of_tables = torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=0.05)
        of_bias = torch.optim.Adam(bias.parameters(), lr=0.05)

    def step(user: torch.Tensor, bag: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        of_tables.zero_grad()
        of_bias.zero_grad()
        found = (users(user) * items(bag)).sum(dim=1) + bias(user)[:, 0]
        loss = functional.mse_loss(found, score)
        loss.backward()
        of_tables.step()
        of_bias.step()
        return loss

    user, bag = torch.tensor([0, 1, 1, 7, 3, 0, 5]), torch.arange(14).view(7, 2) * 5 % 9
    return [on.mean(on(step, user, bag, torch.linspace(0, 1, 7))) for _ in range(2)], users.weight, items.weight


@pytest.mark.parametrize("program", list(programs), ids=repr)
def test_equals_plain_torch(program: Program, row: sg.Strategy) -> None:
    program.check(row)
