"""The variables of a program in a cluster with parameter servers: their names, and how a step updates them.

Owns what `optimizer.step()` and sparse embeddings mean in a task that trains. How tensors travel is
`parameters.network`'s.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch

from stratagem import _torch
from stratagem.engine import context
from stratagem.engine.notices import NonFinite
from stratagem.errors import ParameterError, StrategyError, TaskLostError
from stratagem.parameters.local.push import is_finite_gradient
from stratagem.parameters.network import keras_optimizers as keras
from stratagem.parameters.network import tensor_streams
from stratagem.parameters.network.client.parameter_client import ParameterClient
from stratagem.parameters.network.server.pacing import Pacing
from stratagem.parameters.network.shard_states import StateOfAll
from stratagem.parameters.partitioning import Partitioner, make_plan
from stratagem.parameters.protocol import Plain, PushOutcome, Variable, Verdict, describe_optimizer, plain_options
from stratagem.parameters.shard import OPTIMIZERS
from stratagem.variables.optimizer_slices import parameters_of, put_step, step_with_hooks


@final
class ServedVariables:
    """What a program has made in the scope, and what parameter servers have of it.

    Args:
        client: The way to the servers.
        made: The modules, parameters and optimizers, in the order of their making.
        rank: Which of the tasks that train this is.
        partitioner: Cuts large variables.
        on_nonfinite: What a gradient that is not finite does to its step: `skip` or `raise`.
    Raises:
        StrategyError: There is nothing to train, or no optimizer.
        ParameterError: The servers cannot apply the optimizer.
    """

    def __init__(
        self,
        client: ParameterClient,
        made: Sequence[Any],
        *,
        rank: int,
        partitioner: Partitioner | None,
        on_nonfinite: str,
    ) -> None:
        self._client = client
        self._rank = rank
        self._keras = keras.optimizers_in(made)
        self._roots = [] if self._keras else _roots(made)
        self._parameters = keras.variables_of(self._keras) if self._keras else dict(_named(made))
        self._sparse = {id(each.weight): each for each in made if isinstance(each, torch.nn.Embedding) and each.sparse}
        self._optimizers = [each for each in made if isinstance(each, torch.optim.Optimizer)]
        if not self._parameters or not (self._optimizers or self._keras):
            raise StrategyError(
                "parameter servers keep the variables of a model and an optimizer that were made in the scope; make "
                "both inside "
                "`with strategy.scope():`, before the first run"
            )
        if self._optimizers and self._keras:
            raise StrategyError(
                "parameter servers train a Keras model or a torch model, not both; make only one of them in the scope"
            )
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        for optimizer in self._optimizers:
            _require_known(optimizer, self._names)
        self.plan = make_plan(
            [
                Variable(name, tuple(each.shape), each.dtype, sparse=id(each) in self._sparse)
                for name, each in self._parameters.items()
            ],
            client.num_servers,
            partitioner,
        )
        self._dense = {name: each for name, each in self._parameters.items() if id(each) not in self._sparse}
        self._nonfinite = NonFinite(on_nonfinite)
        self.version = 0
        self.num_pushes = 0
        self.num_dropped = 0
        self.weight = 1
        self._fetched_at: int | None = None
        self._hooks: list[Any] = []
        self._is_synchronous = False
        self.staleness: dict[int, int] = {}

    def define(self, *, is_chief: bool, state: StateOfAll | None, pacing: Pacing, has_replicas: bool = False) -> None:
        """Agrees with the servers and all other tasks on the variables, and fetches their values.

        Args:
            is_chief: Whether the values of this task are the first.
            state: What there is instead of them, from a checkpoint.
            pacing: How far tasks may be apart.
            has_replicas: Whether this task has several, which call `update` when their gradients are summed.
        """
        if has_replicas:
            self._require_fit_for_replicas()
        for each in self._optimizers:
            _torch.compiling.refuse_compiled_step(vars(each).get("step"))
            _require_torchs(each)
        specs = [describe_optimizer(each, self._names) for each in self._optimizers]
        specs += [keras.described(each, self._names) for each in self._keras]
        self._is_synchronous = pacing.consistency.shares_steps
        if len(specs) > 1 and self._is_synchronous and not pacing.consistency.needs_all(len(pacing.members)):
            raise StrategyError(
                "with Synchronous(backup_workers=...) a worker that has missed a step would push to another "
                "optimizer than the other workers; use one optimizer, with a parameter group for each kind of "
                "parameter"
            )
        values = None
        if is_chief:
            values = {name: each.detach() for name, each in self._parameters.items()}
            state = state or self._state_there_is(values, 1 if self._is_synchronous else len(pacing.members))
            self._fetch_before_saving(made=self._roots)
        self._client.define(self.plan, specs, values, state=state if is_chief else None, pacing=pacing)
        for number, optimizer in enumerate(() if has_replicas else self._optimizers):
            self._take_over(number, optimizer)
        for number, (each, spec) in enumerate(zip(self._keras, specs, strict=True) if self._keras else ()):
            keras.take_over(each, spec, self._names, functools.partial(self._push, number))
        for parameter, module in ((each.weight, each) for each in self._sparse.values()):
            name = self._names[id(parameter)]
            fetch = functools.partial(_fetch_rows, self._client, name)
            self._hooks.append(module.register_forward_pre_hook(fetch, with_kwargs=True))
        loaded: list[Any] = [*self._roots, *self._optimizers]
        for holder in loaded:
            self._hooks.append(holder.register_load_state_dict_pre_hook(_refuse_to_load))
        self.pull()

    def require_same(self, made: Sequence[Any]) -> None:
        """Refuses what was made after the first run, if it were to be trained.

        Raises:
            StrategyError: There is an optimizer among it.
        """
        known = [*self._optimizers, *self._keras]
        new = [each for each in made if isinstance(each, torch.optim.Optimizer)] + keras.optimizers_in(made)
        if any(all(each is not other for other in known) for each in new):
            raise StrategyError(
                "parameter servers keep the variables that all tasks had at the first run, but another optimizer was "
                "made after it; train one model, compiled once, in each program"
            )

    def pull(self) -> None:
        """Fetches the values of all variables that are not sparse."""
        self._pull(self._dense)

    def pull_all(self) -> None:
        """Fetches the values of all variables, sparse ones too: to evaluate or to save."""
        self._pull(self._parameters)

    def _pull(self, into: Mapping[str, torch.Tensor]) -> None:
        self._fetched_at = None
        outcomes = self._client.wait(self._client.pull(into))
        self.version = max((each.version for each in outcomes), default=0)
        torch.autograd.graph.increment_version(list(into.values()))

    def let_go(self) -> None:
        """Nothing is fetched any more: the model works as a plain one, with what it has."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._keras:
            keras.let_go(optimizer)

    def _state_there_is(self, values: Mapping[str, torch.Tensor], num_pushing: int) -> StateOfAll | None:
        """What optimizers have been given by a checkpoint, with the values of now; `None` if nothing."""
        states = [
            {self._names[id(each)]: _readable(own) for each, own in optimizer.state.items() if _readable(own)}
            for optimizer in self._optimizers
        ] + [keras.state_of(each, self._names, num_pushing) for each in self._keras]
        here = {name: tensor_streams.readable(value) for name, value in values.items()}
        return StateOfAll(0, here, tuple(states)) if any(states) else None

    def _fetch_before_saving(self, made: Sequence[torch.nn.Module]) -> None:
        """Lets `state_dict()` of models and optimizers give what the servers have, all of one moment."""
        for each in (*made, *self._optimizers):
            hooked: Any = each
            self._hooks.append(hooked.register_state_dict_pre_hook(lambda *_: self._fetch_state()))
        for optimizer in self._keras:
            keras.save_with(optimizer, self._fetch_state)

    @torch.no_grad()
    def _fetch_state(self) -> None:
        if self._fetched_at == self.num_pushes:
            return
        self._fetched_at = self.num_pushes
        state = self._client.state()
        for name, value in state.values.items():
            self._parameters[name].copy_(value)
        for optimizer, states in zip(self._optimizers, state.optimizers, strict=False):
            for name, own in states.items():
                optimizer.state[self._parameters[name]] = dict(own)
        for of_keras, states in zip(self._keras, state.optimizers, strict=False):
            keras.put_state(of_keras, self._names, states)

    @staticmethod
    @torch.no_grad()
    def load_values(made: Sequence[Any], state: StateOfAll) -> None:
        """Gives the values of a state to a model that no server keeps.

        Raises:
            ParameterError: The state is of another model.
        """
        own = dict(_named(made))
        if own.keys() != state.values.keys():
            raise ParameterError(
                f"the state has the variables {sorted(state.values)}, but the model has "
                f"{sorted(own)}; load the state of the same model"
            )
        for name, parameter in own.items():
            parameter.copy_(state.values[name])

    def _take_over(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Puts a push in the place of the optimizer's step."""
        held = weakref.ref(optimizer)  # weak: it holds the step, and must go when dropped

        def step(closure: Any = None) -> Any:
            own = held()
            if own is None:
                return None
            if not context.state.replicas:
                raise StrategyError("optimizer.step() was called outside strategy.run; call it in what you run")
            _torch.optimizer_parts.mark_stepped(own)
            return step_with_hooks(own, functools.partial(self._push_gradients, number, own), closure)

        put_step(optimizer, step)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Pushes the gradients of several replicas of this task, which have been summed, and fetches new values."""
        number = next(number for number, each in enumerate(self._optimizers) if each is optimizer)
        step_with_hooks(optimizer, functools.partial(self._push_gradients, number, optimizer))

    def _require_fit_for_replicas(self) -> None:
        """Refuses what only a task with one device can have: rows are fetched, and Keras updates, in one process."""
        if self._keras or self._sparse:
            raise StrategyError(
                f"{'Keras optimizers' if self._keras else 'sparse embeddings'} need exactly one device in each "
                f"worker task of a cluster; start a worker for each device, or choose one device with devices=[...]"
            )

    def _push_gradients(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        gradients = {self._names[id(each)]: each.grad for each in parameters_of(optimizer) if each.grad is not None}
        self._push(number, gradients, plain_options(optimizer))

    def _push(self, number: int, gradients: dict[str, torch.Tensor], options: tuple[dict[str, Plain], ...]) -> None:
        bad = next((name for name, gradient in gradients.items() if not is_finite_gradient(gradient)), None)
        weight = self.weight if bad is None else 0
        if bad is not None and self.weight:  # no server gets any of it: some would apply their part
            self._nonfinite.judge([(self._rank, bad)], updated=False, run_number=self.num_pushes)
        if not weight:  # a mean over no example is not a number either
            if not self._is_synchronous:
                return
            gradients = {}  # the others wait for this task
        # The options with each of them: those of other workers may be others.
        pushed = self._client.push(gradients, optimizer=number, weight=weight, options=options, into=self._dense)
        outcomes = self._client.wait(pushed)
        torch.autograd.graph.increment_version(list(self._dense.values()))
        self._judge(outcomes)

    def _judge(self, outcomes: Sequence[PushOutcome]) -> None:
        self.num_pushes += 1
        self.version = max(each.version for each in outcomes)
        worst = max(each.staleness for each in outcomes)
        self.staleness[worst] = self.staleness.get(worst, 0) + 1
        bad = next((each for each in outcomes if not each.is_applied), None)
        if bad is None:
            self._nonfinite.judge((), updated=True, run_number=self.num_pushes)
        elif bad.verdict is Verdict.FENCED:
            raise TaskLostError(f"the parameter servers no longer accept pushes of this task: {bad.reason}")
        elif bad.verdict is Verdict.STALE:
            self.num_dropped += 1
        else:
            raise ParameterError(f"a parameter server refused push {self.num_pushes}: {bad.reason}")


def _refuse_to_load(*_: Any) -> None:
    raise StrategyError(
        "call load_state_dict() before the first run, or after the strategy is closed: in between, the parameter "
        "servers have the values. To go back to an earlier state, start all tasks again"
    )


def _fetch_rows(
    client: ParameterClient, name: str, module: torch.nn.Embedding, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Fetches the rows of a sparse embedding that a forward pass will read."""
    weight = module.weight
    rows = (inputs[0] if inputs else named["input"]).detach().reshape(-1).to("cpu", torch.int64)
    client.wait(client.pull({name: weight}, {name: rows}))
    torch.autograd.graph.increment_version(weight)


def _named(made: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters with names that are the same in every task: as in the `state_dict` of a single model."""
    roots = _roots(made)
    seen: set[int] = set()
    for place, root in enumerate(roots):
        for name, parameter in root.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{place}.{name}" if len(roots) > 1 else name), parameter
    loose = [each for each in made if isinstance(each, torch.nn.Parameter) and id(each) not in seen]
    for place, parameter in enumerate(loose):
        yield f"parameter.{place}", parameter


def _roots(made: Sequence[Any]) -> list[torch.nn.Module]:
    """The modules that are in no other, and have parameters."""
    modules = [each for each in made if isinstance(each, torch.nn.Module)]
    inner = {id(each) for module in modules for each in module.modules() if each is not module}
    return [each for each in modules if id(each) not in inner and next(each.parameters(), None) is not None]


def _readable(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: tensor_streams.readable(value) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if value is not None
    }


def _require_torchs(optimizer: torch.optim.Optimizer) -> None:
    """Servers know optimizers by name: one of another class must not be taken for torch's."""
    kind = type(optimizer)
    if kind is not OPTIMIZERS.get(kind.__name__):
        raise ParameterError(
            f"parameter servers apply torch's own {', '.join(OPTIMIZERS)}, got {kind.__module__}.{kind.__qualname__}, "
            f"whose code they do not have; use one of them"
        )


def _require_known(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    for parameter in parameters_of(optimizer):
        if id(parameter) not in names:
            raise StrategyError(
                f"optimizer {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that "
                f"was not made in the scope; make model and optimizer inside the same scope"
            )
