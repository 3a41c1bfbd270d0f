"""Lets Keras train on all replicas: `fit`, `evaluate`, `predict` and their kin, of models made in a scope.

Keras' own loop runs in the main program, with its data, callbacks and progress bar. Only the function
that it calls for each batch is another one: it cuts the global batch and runs the step in every replica.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import keras
import torch
from keras.src import backend
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.trainers.trainer import Trainer

from stratagem.errors import StrategyError
from stratagem.replicas import wire
from stratagem.strategies import context
from stratagem.strategies.strategy import Strategy
from stratagem.training import keras_steps, keras_wire

_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

_owners: "weakref.WeakKeyDictionary[Any, Strategy]" = weakref.WeakKeyDictionary()
_steps: "weakref.WeakKeyDictionary[Any, _Steps]" = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Connects Keras, once for the process."""
    if keras.backend.backend() != "torch":
        _wrap(Trainer, "__init__", _refuse_backend)
        return
    wire.reducers.append(keras_wire.reduce)
    _wrap(TorchTrainer, "__init__", _note_owner)
    _wrap(Trainer, "_symbolic_build", _build_in_scope)
    for kind in ("train", "test", "predict"):
        _wrap(TorchTrainer, f"make_{kind}_function", functools.partial(_make_function, kind))
    for name in _LOOPS:
        _wrap(TorchTrainer, name, functools.partial(_require_owner, name))


@final
class _Steps:
    """The steps of one model on the replicas of its strategy.

    Args:
        model: The Keras model.
        strategy: Its strategy.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model = weakref.ref(model)
        self._strategy = strategy
        self._batch: Any = None
        self._slices = iter(strategy.distribute(self._batches()))
        self._compiled: keras_steps.Compiled | None = None

    def train(self, data: Any) -> Any:
        """What Keras calls for a batch to train on."""
        return self._logs(self._run(keras_steps.train_step, data[0]))

    def test(self, data: Any) -> Any:
        """What Keras calls for a batch to evaluate."""
        return self._logs(self._run(keras_steps.test_step, data[0]))

    def predict(self, data: Any) -> Any:
        """What Keras calls for a batch to predict."""
        self._build(data[0])
        return self._strategy.gather(self._run(keras_steps.predict_step, data[0]))

    def _run(self, step: Callable[..., Any], batch: Any) -> Any:
        self._batch = keras.tree.map_structure(lambda each: each if each is None else torch.as_tensor(each), batch)
        return self._strategy.run(step, args=(self._current(), next(self._slices)))

    def _build(self, batch: Any) -> None:
        """Builds what is not built yet, which `predict` leaves to the first call: replicas would draw other weights."""
        model: Any = self._model()
        if self._compiled is None and not all(layer.built for layer in model._flatten_layers()):
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            with self._strategy.scope():
                backend.compute_output_spec(model, keras.tree.map_structure(_symbolic, inputs), training=False)
            model._post_build()

    def _batches(self) -> Iterator[Any]:
        while True:
            yield self._batch

    def _current(self) -> keras_steps.Compiled:
        model: Any = self._model()
        variables = keras_steps.variables_of(model)
        if self._compiled is None or not self._compiled.is_current(variables):
            self._compiled = keras_steps.Compiled(model, variables)
            self._strategy.take([*map(keras_wire.tensor_of, variables), *variables, model, self._compiled])
        return self._compiled

    def _logs(self, logs: Any) -> Any:
        """One value of each: metrics are the same in all replicas, other values become their mean."""
        return {name: self._strategy.reduce("mean", value) for name, value in logs.items()}


def _symbolic(value: Any) -> Any:
    return None if value is None else keras.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _refuse_backend(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    if context.state.scopes:
        raise StrategyError(
            f"Keras runs on {keras.backend.backend()!r}; a strategy distributes Keras models on torch. Set "
            f"KERAS_BACKEND=torch before Keras is imported"
        )
    original(model, *args, **kwargs)


def _note_owner(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    if context.state.scopes:
        _owners[model] = context.state.scopes[-1]


def _build_in_scope(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds what is not built yet, so that its variables are distributed."""
    strategy = _owners.get(model)
    if strategy is None or context.state.replicas:
        return original(model, *args, **kwargs)
    with strategy.scope():
        return original(model, *args, **kwargs)


def _make_function(kind: str, original: Callable[..., Any], model: Any, force: bool = False) -> Any:
    strategy, name = _owners.get(model), f"{kind}_function"
    if strategy is None or context.state.replicas:
        return original(model, force=force)
    if getattr(model, name) is None or force:
        if model.jit_compile:
            raise StrategyError(
                "a model was compiled with jit_compile=True, but under a strategy replicas run its steps one by one; "
                "compile it with jit_compile=False"
            )
        steps = _steps.get(model) or _steps.setdefault(model, _Steps(model, strategy))
        setattr(model, name, getattr(steps, kind))
    return getattr(model, name)


def _require_owner(what: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    scope = context.state.scopes[-1] if context.state.scopes else None
    if scope is not None and _owners.get(model) is not scope:
        raise StrategyError(
            f"model {model.name!r} was created outside strategy.scope(), so {what}() would not be distributed; "
            f"create or load it inside `with strategy.scope():`"
        )
    return original(model, *args, **kwargs)
