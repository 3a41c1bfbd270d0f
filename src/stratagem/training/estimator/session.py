"""One training, evaluation or prediction under way: steps on the replicas, hooks around them.

Owns the loop and the functions that the replicas run. What is saved and restored is `states`',
where batches come from is `feed`'s.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch.utils import _pytree as pytree

from stratagem.strategies.strategy import Strategy
from stratagem.training.estimator.checks import EstimatorError
from stratagem.training.estimator.feed import Feed, num_examples_in
from stratagem.training.estimator.hooks import RunContext, RunValues, SessionRunHook
from stratagem.training.estimator.specs import EstimatorSpec, ModeKeys, is_metric

Batch = tuple[Any, Any]


@final
class Session(RunContext):
    """A model, its input and the hooks, from the first step to the last.

    Args:
        strategy: Where steps run.
        spec: The model.
        feed: The input.
        first: Its first batch, which has been taken already.
        global_step: How many steps the model has been trained.
        save: Writes a checkpoint of a session.
    """

    def __init__(
        self,
        strategy: Strategy,
        spec: EstimatorSpec,
        feed: Feed,
        first: Batch | None,
        global_step: int,
        save: Callable[["Session", bool], str],
    ) -> None:
        self.strategy = strategy
        self.spec = spec
        self.feed = feed
        self.mode = str(spec.mode)
        self.module = spec.module
        self.optimizer = spec.optimizer
        self.global_step = global_step
        self._first = first
        self._save = save

    def save(self, *, finished: bool) -> str:
        return self._save(self, finished)

    def run(self, hooks: Sequence[SessionRunHook]) -> Iterator[tuple[Batch, Any]]:
        """Takes steps until the input ends or a hook asks for the end; gives each batch with its results."""
        step = _STEPS[ModeKeys(self.mode)](self.spec)
        training = self.mode == ModeKeys.TRAIN
        self.module.train(training)
        for hook in hooks:
            hook.begin()
        for hook in hooks:
            hook.after_create_session(self)
        while not self.stop_requested and (batch := self._next()) is not None:
            for hook in hooks:
                hook.before_run(self)
            results = self.strategy.run(step, args=batch)
            self.global_step += training
            values = _Values(self, results)
            for hook in hooks:
                hook.after_run(self, values)
            yield batch, results
        for hook in hooks:
            hook.end(self)

    def _next(self) -> Batch | None:
        first, self._first = self._first, None
        return first if first is not None else self.feed.next()


@final
class _Values(RunValues):
    def __init__(self, session: Session, results: Any) -> None:
        self._session = session
        self._results = results

    @functools.cached_property
    def loss(self) -> float:
        results = self._results
        if self._session.mode == ModeKeys.PREDICT:
            return float("nan")
        if self._session.mode == ModeKeys.EVAL:
            results = results["means"]["loss"]
        return float(self._session.strategy.reduce("mean", results))

    @property
    def learning_rate(self) -> float:
        optimizer = self._session.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else float("nan")

    @property
    def results(self) -> Any:
        return self._results


@final
class Evaluation:
    """Adds up what the batches of an evaluation gave.

    Args:
        session: The session whose batches they are.
    """

    def __init__(self, session: Session) -> None:
        self._strategy = session.strategy
        self._metrics = _metric_objects(session.spec)
        self._sums: dict[str, torch.Tensor] = {}
        self._num_examples = 0

    def add(self, batch: Batch, results: Any) -> None:
        """Takes the results of one batch."""
        num_examples = num_examples_in(batch)
        self._num_examples += num_examples
        for name, mean in self._strategy.reduce("mean", results["means"]).items():
            share = torch.as_tensor(mean, dtype=torch.float64) * num_examples
            self._sums[name] = self._sums[name] + share if name in self._sums else share
        if self._metrics:
            outputs = self._strategy.gather(results["outputs"])
            labels = self._strategy.gather(results["labels"]) if batch[1] is not None else None
            for metric in self._metrics.values():
                metric.update(outputs, labels)

    def result(self) -> dict[str, Any]:
        """The loss and the metrics over all examples."""
        means = {name: total / self._num_examples for name, total in self._sums.items()}
        computed = {name: torch.as_tensor(metric.compute()) for name, metric in self._metrics.items()}
        return {name: each.item() if each.dim() == 0 else each for name, each in {**means, **computed}.items()}


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
    leaves = pytree.tree_leaves(predictions)
    lengths = {len(each) if each.dim() else 0 for each in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise EstimatorError("predictions have one row for each example, got first dimensions " + repr(sorted(lengths)))
    for row in range(lengths.pop()):
        yield pytree.tree_map(lambda each, row=row: each[row], predictions)


def _train_step(spec: EstimatorSpec) -> Callable[[Any, Any], Any]:
    module, scheduler, train_op = spec.module, spec.scheduler, spec.train_op
    loss_of = cast(Callable[[Any, Any], torch.Tensor], spec.loss)
    optimizer = cast(torch.optim.Optimizer, spec.optimizer)

    def step(features: Any, labels: Any) -> torch.Tensor:
        features, labels = _beside(module, (features, labels))
        optimizer.zero_grad()
        loss = loss_of(module(features), labels)
        if train_op is not None:
            train_op(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say its types
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss.detach()

    return step


def _evaluation_step(spec: EstimatorSpec) -> Callable[[Any, Any], Any]:
    module, loss_of = spec.module, cast(Callable[[Any, Any], torch.Tensor], spec.loss)
    whole = bool(_metric_objects(spec))
    functions = {name: each for name, each in (spec.eval_metric_ops or {}).items() if not is_metric(each)}

    def step(features: Any, labels: Any) -> dict[str, Any]:
        with torch.no_grad():
            features, labels = _beside(module, (features, labels))
            outputs = module(features)
            means = {name: function(outputs, labels) for name, function in functions.items()}
            results = {"means": {"loss": loss_of(outputs, labels), **means}}
        return {**results, "outputs": outputs, "labels": labels} if whole else results

    return step


def _prediction_step(spec: EstimatorSpec) -> Callable[[Any, Any], Any]:
    module, predictions_of = spec.module, spec.predictions

    def step(features: Any, labels: Any) -> Any:
        with torch.no_grad():
            outputs = module(_beside(module, features))
            return outputs if predictions_of is None else predictions_of(outputs)

    return step


_STEPS = {
    ModeKeys.TRAIN: _train_step,
    ModeKeys.EVAL: _evaluation_step,
    ModeKeys.PREDICT: _prediction_step,
}


def _metric_objects(spec: EstimatorSpec) -> Mapping[str, Any]:
    return {name: each for name, each in (spec.eval_metric_ops or {}).items() if is_metric(each)}


def _beside(module: torch.nn.Module, value: Any) -> Any:
    """A value on the device of a module."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type == "cpu":
        return value
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(parameter.device), value)
