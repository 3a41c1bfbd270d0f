"""One training, evaluation or prediction under way: steps, and hooks around them.

Owns the loop. What a step does is the model's (`models`), where batches come from is `feed`'s, what is saved
`training_state`'.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from stratagem import _tree
from stratagem.engine import random_state
from stratagem.errors import EstimatorError, LostError
from stratagem.strategies.strategy import Strategy
from stratagem.training.estimator.feed import Feed
from stratagem.training.estimator.hooks import RunContext, RunValues, SessionRunHook
from stratagem.training.estimator.models import Batch, Model
from stratagem.training.estimator.specs import ModeKeys


@final
class EstimatorSession(RunContext):
    """A model, its input and the hooks, from the first step to the last.

    Args:
        strategy: Where the model is.
        model: The model.
        feed: The input.
        first: Its first batch, which has been taken already.
        position: Where the input was before that batch.
        global_step: How many steps the model has been trained.
        save: Writes a checkpoint of a session.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Model,
        feed: Feed,
        first: Batch | None,
        position: Mapping[str, Any],
        global_step: int,
        save: Callable[["EstimatorSession", bool], str],
    ) -> None:
        self.model = model
        self.feed = feed
        self.mode = str(model.mode)
        self.module = model.module
        self.optimizer = model.optimizer
        self.global_step = global_step
        self.position = position  # of the batches that the model has been trained with, for a checkpoint
        self._strategy = strategy
        self._first = first
        self._save = save

    def save(self, *, finished: bool) -> str:
        return self._save(self, finished)

    def agree(self, wish: bool) -> bool:
        return self._strategy.is_any(wish)

    def run(self, hooks: Sequence[SessionRunHook]) -> Iterator[tuple[Batch, Any]]:
        """Takes steps until the input ends or a hook asks for the end; gives each batch with its results."""
        training = self.model.mode == ModeKeys.TRAIN
        self.model.begin()
        for hook in hooks:
            hook.after_create_session(self)
        while not self.stop_requested and (batch := self._next()) is not None:
            for hook in hooks:
                hook.before_run(self)
            results = self._step(batch)
            self.global_step += training
            self.position = self.feed.position()
            values = _Values(self.model, results)
            for hook in hooks:
                hook.after_run(self, values)
            yield batch, results
        for hook in hooks:
            hook.end(self)

    def _step(self, batch: Batch) -> Any:
        if self.model.mode == ModeKeys.TRAIN:
            # The other replicas have generators of their own. A strategy seeds them whenever the program has drawn a
            # number, so what they draw in this step follows from the state here, which checkpoints keep: it is the
            # same however often a training is saved, and if it goes on from a checkpoint.
            random_state.draw()
        try:
            return self.model.run(batch)
        except LostError as error:
            if self.model.mode == ModeKeys.TRAIN:
                error.args = (f"{error}; at step {self.global_step + 1} of the training", *error.args[1:])
            raise

    def _next(self) -> Batch | None:
        first, self._first = self._first, None
        return first if first is not None else self.feed.next()


@final
class _Values(RunValues):
    def __init__(self, model: Model, results: Any) -> None:
        self._model = model
        self._results = results

    @functools.cached_property
    def loss(self) -> float:
        return self._model.loss(self._results)

    @property
    def learning_rate(self) -> float:
        return self._model.learning_rate

    @property
    def results(self) -> Any:
        return self._results


def chosen(predictions: Any, keys: Sequence[str] | None) -> Any:
    """Those of the predictions that were asked for."""
    if keys is None:
        return predictions
    if not isinstance(predictions, dict):
        raise EstimatorError(f"predict_keys goes with predictions that are a dict, got {type(predictions).__name__}")
    missing = [key for key in keys if key not in predictions]
    if missing:
        raise EstimatorError(f"no prediction is named {missing[0]!r}; known: {', '.join(map(repr, predictions))}")
    return {key: predictions[key] for key in keys}


def rows(predictions: Any) -> Iterator[Any]:
    """The predictions of single examples."""
    leaves = _tree.leaves(predictions)
    lengths = {len(each) if each.dim() else 0 for each in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise EstimatorError("predictions have one row for each example, got first dimensions " + repr(sorted(lengths)))
    for row in range(lengths.pop()):
        yield _tree.map(operator.itemgetter(row), predictions)
