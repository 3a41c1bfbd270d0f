"""Lets Keras train on all replicas: `fit`, `evaluate`, `predict` and their kin, of models made in a scope.

Keras' own loop runs in the main program, with its data, callbacks and progress bar. Only the function
that it calls for each batch is another one: it cuts the global batch and runs the step in every replica.
"""

import collections
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import keras
import numpy as np
import torch
from keras.src import backend
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.trainers.trainer import Trainer

from stratagem import _tree
from stratagem._turns import Turn
from stratagem.engine import context
from stratagem.errors import StrategyError
from stratagem.inputs import require_whole
from stratagem.objects import kinds
from stratagem.objects.per_replica import PerReplica
from stratagem.processes import packing
from stratagem.strategies.strategy import Strategy
from stratagem.training.keras import (
    changes,
    differences,
    keras_objects,
    metric_state,
    pending_steps,
    split_updates,
    steps,
)

_KINDS = ("train", "test", "predict")
_WITHOUT_TRAINING = ("test", "predict")  # what a model can do on its own when its strategy is closed
_LAGGING = ("fit", "evaluate")  # whose logs may be those of an earlier step
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

_owners: "weakref.WeakKeyDictionary[Any, Strategy]" = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Connects Keras, once for the process."""
    if keras.backend.backend() != "torch":
        _wrap(Trainer, "__init__", _refuse_backend)
        return
    packing.reducers += [split_updates.reduce, keras_objects.reduce]
    split_updates.install()
    kinds.kept_elsewhere.append(keras.Layer)  # `changes` knows what layers hold
    _wrap(TorchTrainer, "__init__", _note_owner)
    _wrap(Trainer, "_symbolic_build", _build_in_scope)
    for kind in _KINDS:
        _wrap(TorchTrainer, f"make_{kind}_function", functools.partial(_make_function, kind))
    _wrap(Trainer, "compile", _compile)  # Keras asks whether a model has its own: not that of another class
    for name in _LOOPS:
        _wrap(TorchTrainer, name, functools.partial(_require_owner, name))
    _wrap(EpochIterator, "_interrupted_warning", _warn_of_missing_data)
    _wrap(keras.callbacks.CallbackList, "__init__", _init_callbacks)
    _wrap(keras.callbacks.CallbackList, "on_epoch_end", _end_epoch)


@final
class _Steps:
    """The steps of one model on the replicas of its strategy.

    Args:
        model: The Keras model.
        strategy: Its strategy.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model: Any = weakref.ref(model)
        self._strategy = strategy
        self._shares_steps = strategy.num_replicas_in_sync > 1 and strategy.is_in_step
        # Several machines would give each other all variables after each step.
        self._loops_in_replicas = self._shares_steps and strategy.input_pipeline[0] == 1
        self._waiting: collections.deque[Any] = collections.deque()
        self._slices = iter(strategy.distribute(self._batches()))
        self._compiled: steps.Compiled | None = None
        self._seen: Any = None  # `changes.Seen`, with the first step
        self._changed: dict[int, Any] = {}
        self._under_way = pending_steps.UnderWay(strategy)

    def train(self, data: Sequence[Any]) -> Any:
        """What Keras calls for batches to train on: `steps_per_execution` of them, fewer at the end of the data."""
        return self._logs("train", data)

    def test(self, data: Sequence[Any]) -> Any:
        """What Keras calls for batches to evaluate."""
        return self._logs("test", data)

    def predict(self, data: Sequence[Any]) -> Any:
        """What Keras calls for batches to predict."""
        self._build(data[0])
        outputs = [
            self._strategy.gather(told) if self._shares_steps else self._strategy.local_results(told)[0]
            for told in self._run("predict", data)
        ]
        return outputs[0] if len(outputs) == 1 else keras.tree.map_structure(lambda *each: torch.cat(each), *outputs)

    def _logs(self, kind: str, batches: Sequence[Any]) -> Any:
        """What the last of some steps tells: metrics as they are for all replicas, other numbers as their mean."""
        model, told = self._model(), self._run(kind, batches)
        if not self._shares_steps:
            return [self._under_way.logs_after(each) for each in told][-1]
        logs = told[-1]
        if isinstance(logs, PerReplica):  # left open by a step of Keras' own
            return model.get_metrics_result()
        return _tree.map_only(PerReplica, self._joined, logs)

    def _joined(self, log: PerReplica) -> Any:
        is_number = isinstance(log[0], torch.Tensor | np.ndarray | np.number | int | float)
        return self._strategy.reduce("mean", log) if is_number else log[0]

    def _run(self, kind: str, batches: Sequence[Any]) -> list[Any]:
        """Runs a step for each batch on all replicas, and keeps what they changed."""
        if len(batches) > 1 and not self._loops_in_replicas:
            return [told for batch in batches for told in self._run(kind, [batch])]
        compiled = self._current()
        if kind != "train":
            self._strategy.synchronize()
        self._waiting = collections.deque(keras.tree.map_structure(_as_tensor, batch) for batch in batches)
        if len(batches) > 1:
            results = self._strategy.run(steps.kept_step, args=(kind, compiled, self._slices), num_steps=len(batches))
        else:
            # A program that is not in step with the others has nobody to evaluate or predict the rest of a batch.
            shares = kind == "train" or self._strategy.is_in_step
            data = next(self._slices) if shares else self._waiting.popleft()
            results = [self._strategy.run(steps.step, args=(kind, compiled, data))]
            if self._shares_steps:
                _, sums = results[0]
                compiled.state(kind).keep(None if sums[0] is None else self._strategy.reduce("sum", sums))
        self._seen.note()
        return [each[0] for each in results]

    def _build(self, batch: Any) -> None:
        """Builds what is not built yet, which `predict` leaves to the first call: replicas would draw other weights."""
        model = self._model()
        if self._compiled is None and not all(layer.built for layer in model._flatten_layers()):
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self._strategy.scope():
                backend.compute_output_spec(model, keras.tree.map_structure(_symbolic, inputs), training=False)
            model._post_build()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield self._waiting.popleft()

    def _current(self) -> steps.Compiled:
        """The model as it is now; the replicas get it anew if it is not as they have it."""
        model = self._model()
        parts = changes.parts_of(model)
        variables = changes.variables_of(model, parts)
        seen = self._seen or changes.Seen(model, parts, variables)
        changed = seen.changed_layers()
        if self._compiled is None or changed or not seen.is_current(parts, variables):
            if self._strategy.input_pipeline[0] > 1:
                gc.collect()  # programs that train together must drop their old models, which are circles, together
            if self._strategy.is_in_step:
                self._changed.clear()  # all replicas have run since; others may have missed what came before
            self._changed.update((id(layer), layer) for layer in changed)
            self._compiled = steps.Compiled(model, parts, variables, list(self._changed.values()))
            self._seen = changes.Seen(model, parts, variables)
            self._seen.send()
            self._strategy.take([*map(keras_objects.tensor_of, variables), model, self._compiled])
        return self._compiled


def _as_tensor(value: Any) -> Any:
    return None if value is None else torch.as_tensor(value)


def _symbolic(value: Any) -> Any:
    return None if value is None else keras.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _refuse_backend(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    if context.current_scope() is not None:
        raise StrategyError(
            f"Keras runs on {keras.backend.backend()!r}; a strategy distributes Keras models on torch. Set "
            f"KERAS_BACKEND=torch before Keras is imported"
        )
    original(model, *args, **kwargs)


def _note_owner(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    if (scope := context.current_scope()) is not None:
        _owners[model] = scope


def _build_in_scope(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds what is not built yet, so that its variables are distributed."""
    strategy = _owners.get(model)
    if strategy is None or context.current_replica() or not _is_open(strategy):
        return original(model, *args, **kwargs)
    # It looks at a batch, which loaders make on the host; Keras says itself where its variables are.
    with strategy.scope(), torch.device("cpu"), metric_state.for_loop():
        return original(model, *args, **kwargs)


def _make_function(kind: str, original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    strategy, name = _owners.get(model), f"{kind}_function"
    if strategy is None or context.current_replica() or (kind in _WITHOUT_TRAINING and not _is_open(strategy)):
        return original(model, force=force)
    if getattr(model, name) is None or force:
        differences.refuse(model, strategy)
        steps = _steps_of(model, strategy)
        with _one_step_per_execution(model):
            original(model, force=True)  # refuses what Keras on torch cannot do
        setattr(model, name, getattr(steps, kind))
    return getattr(model, name)


@contextlib.contextmanager
def _one_step_per_execution(model: Any) -> Iterator[None]:
    """A block in which Keras on torch, which has no other number, finds 1: replicas have any."""
    before, model.steps_per_execution = model.steps_per_execution, 1
    try:
        yield
    finally:
        model.steps_per_execution = before


def _warn_of_missing_data(original: Callable[..., None], batches: Any) -> None:
    """Keras takes an execution with fewer steps at the end of the data for data that ran out."""
    number = batches.data_adapter.num_batches
    is_whole = number is not None and batches.steps_per_epoch in (None, number)
    if not (batches.steps_per_execution > 1 and is_whole):
        original(batches)


def _steps_of(model: Any, strategy: Strategy) -> _Steps:
    """The steps of a model, which know what the replicas have of it; only the model keeps them."""
    if keras_objects.STEPS not in model.__dict__:
        model.__dict__[keras_objects.STEPS] = _Steps(model, strategy)
    steps: _Steps = model.__dict__[keras_objects.STEPS]
    return steps


def _init_callbacks(
    original: Callable[..., Any],
    made: Any,
    callbacks: Any = None,
    add_history: bool = False,
    add_progbar: bool = False,
    model: Any = None,
    **params: Any,
) -> None:
    """Of several programs that train together one alone writes files and shows how far it is."""
    strategy = _owners.get(model) if model is not None else None
    if strategy is not None and not strategy.is_chief:
        callbacks = [each for each in keras.tree.flatten(callbacks or []) if not isinstance(each, _WRITERS)]
        for each in callbacks:
            if isinstance(each, keras.callbacks.BackupAndRestore):
                each._save_model = each.on_train_end = _do_nothing  # it restores in all of them
        add_progbar = False
    original(made, callbacks, add_history, add_progbar, model, **params)


def _end_epoch(original: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
    """Callbacks that save or look at weights see those that all replicas agree on."""
    strategy = _owners.get(made.model) if made.model is not None else None
    if strategy is not None and _is_open(strategy):
        strategy.synchronize()
    original(made, *args, **kwargs)


_WRITERS = (
    *(keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard),
    *(keras.callbacks.RemoteMonitor, keras.callbacks.ProgbarLogger),
)


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of what another program does."""


def _compile(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    """Who compiles in a scope means to train there."""
    _require_made_in_scope(model, "fit")
    differences.refuse_metrics(args, kwargs)
    with metric_state.for_loop():
        original(model, *args, **kwargs)
    if (strategy := _owners.get(model)) is not None and not context.current_replica():
        differences.refuse(model, strategy)
        differences.tell(model, strategy)


def _require_owner(what: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    _require_made_in_scope(model, what)
    data = args[0] if args else kwargs.get("x")
    if type(data).__module__.startswith("stratagem."):
        raise StrategyError(
            f"{what}() divides its batches itself, but was given a {type(data).__name__}, as strategy.distribute makes "
            f"it; give it the data as on one device"
        )
    owner = _owners.get(model)
    if owner is not None:
        context.require_controller(f"{what}()")
        require_whole(data)
    if owner is not None and not _is_open(owner):
        for kind in _WITHOUT_TRAINING:
            setattr(model, f"{kind}_function", None)  # Keras' own will be made
    turn = (
        _turns.setdefault(model, Turn()).taken(f"{what}()", refusal=_ONE_THREAD) if owner else contextlib.nullcontext()
    )
    with turn, pending_steps.in_loop(may_go_on=what in _LAGGING):
        return original(model, *args, **kwargs)


_ONE_THREAD = "Keras keeps the state of a loop in its model; give each thread its own model, or let one thread wait"
_turns: "weakref.WeakKeyDictionary[Any, Turn]" = weakref.WeakKeyDictionary()


def _require_made_in_scope(model: Any, what: str) -> None:
    scope = context.current_scope()
    if scope is not None and _owners.get(model) is not scope:
        raise StrategyError(
            f"model {model.name!r} was created outside strategy.scope(), so {what}() would not be distributed; "
            f"create or load it inside `with strategy.scope():`"
        )


def _is_open(strategy: Strategy) -> bool:
    try:
        strategy.require_usable()
    except StrategyError:
        return False
    return True
