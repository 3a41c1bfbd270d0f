"""Opens sessions: finds the place in the input, builds the model, gives it the state of a checkpoint."""

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any, final

from stratagem._caller import warn_caller
from stratagem.engine import random_state
from stratagem.errors import EstimatorError, ParameterError, StratagemWarning
from stratagem.strategies.strategy import Strategy
from stratagem.training.checkpoints import checkpoint_path, require_keepable, save_checkpoint
from stratagem.training.estimator import training_state
from stratagem.training.estimator.estimator_session import EstimatorSession
from stratagem.training.estimator.feed import Feed, example_of
from stratagem.training.estimator.models import Batch, Maker, Model
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import ModeKeys, WarmStartSettings
from stratagem.training.estimator.training_state import State, step_in

_log = logging.getLogger("stratagem")


class InputUsedUpError(Exception):
    """The training that is taken up again had used all of its input."""


@final
class SessionOpener:
    """What all sessions of an Estimator have in common.

    Args:
        maker: Builds the model.
        model_dir: Where checkpoints are kept.
        config: How to run.
        params: Passed on to the user's functions.
        warm_start: Where the weights of a new model come from.
    """

    def __init__(
        self,
        maker: Maker,
        model_dir: str,
        config: RunConfig,
        params: dict[str, Any],
        warm_start: WarmStartSettings | None,
    ) -> None:
        self._maker = maker
        self._model_dir = model_dir
        self._config = config
        self._params = params
        self._warm_start = warm_start

    def open(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        strategy: Strategy,
        found: State | None,
        stack: contextlib.ExitStack,
    ) -> EstimatorSession:
        """Opens the input, builds the model and restores it. What must be closed is left to the stack.

        Raises:
            InputUsedUpError: The training has only to be brought to its end.
        """
        if self._config.random_seed is not None:
            random_state.seed(self._config.random_seed)
        resumed = found[1] if found is not None and mode == ModeKeys.TRAIN else None
        # The model starts from the same numbers, however many its input draws.
        with random_state.kept():
            feed, position, first = self._feed(mode, input_fn, self._maker.divider(strategy), resumed, stack)
            features, labels = example_of(first)[:2]
            after_input = random_state.current()
        with strategy.scope():
            model = self.build(mode, features, labels, strategy)
        if found is not None:
            model.restore(*found)
        elif self._warm_start is not None:
            _log.info("warm start of %s", ", ".join(training_state.warm_start(model, self._warm_start)))
        if resumed is not None:
            random_state.restore(after_input, as_new=True)
        structure = training_state.structure_of(features)

        def save(session: EstimatorSession, finished: bool) -> str:
            strategy.synchronize()
            if finished:
                _wait_for_others(strategy)
            state = training_state.state_of(session, structure, finished=finished)
            step, keep_max = session.global_step, self._config.keep_checkpoint_max
            try:
                if strategy.is_chief:
                    return save_checkpoint(self._model_dir, step, state, keep_max=keep_max)
                return checkpoint_path(self._model_dir, step)
            finally:
                session.agree(True)  # nobody goes on before it is there

        session = EstimatorSession(strategy, model, feed, first, position, step_in(found), save)
        if mode == ModeKeys.TRAIN:
            require_keepable(
                training_state.state_of(session, structure, finished=False)
            )  # not hours later, at the first save
        return session

    def build(self, mode: ModeKeys, features: Any, labels: Any, strategy: Strategy) -> Model:
        """The model for an example of what it is given."""
        labels = None if mode == ModeKeys.PREDICT else labels
        return self._maker.make(mode, features, labels, copy.deepcopy(self._params), self._config, strategy)

    def _feed(
        self,
        mode: ModeKeys,
        input_fn: Callable[..., Any],
        strategy: Strategy,
        resumed: dict[str, Any] | None,
        stack: contextlib.ExitStack,
    ) -> tuple[Feed, dict[str, Any], Batch]:
        """The input, its position and its first batch; of a training that was cut short, the next one."""
        if resumed is not None:
            random_state.restore(random_state.from_values(resumed["random"]), as_new=True)
        goal = resumed["input"] if resumed is not None else None
        position = goal or {"num_epochs": 0, "num_batches": 0, "seed": random_state.draw()}

        def opened() -> Feed:
            available = {"mode": mode, "params": copy.deepcopy(self._params), "config": self._config}
            feed = Feed(input_fn, available, strategy, position["seed"], self._maker.max_parts)
            stack.callback(feed.close)
            return feed

        feed = opened()
        if not feed.go_to(position):
            warn_caller(
                f"the last training was cut short after pass {position['num_epochs']}, batch "
                f"{position['num_batches']} of its input; this input has fewer and is used from its beginning",
                StratagemWarning,
            )
            position = {**position, "num_epochs": 0, "num_batches": 0}
            feed, goal = opened(), None
        if resumed is not None:
            random_state.restore(random_state.from_values(resumed["random"]), as_new=True)
        first = feed.next()
        if first is None and goal is not None:
            raise InputUsedUpError
        if first is None:
            raise EstimatorError("input_fn gave no batch; a training, an evaluation or a prediction needs one")
        return feed, position, first


def _wait_for_others(strategy: Strategy) -> None:
    """Lets the last checkpoint have what all others have done; without one that is gone for good, all the same."""
    try:
        strategy.barrier()
    except ParameterError as error:
        warn_caller(
            f"the last checkpoint may miss updates of other tasks, for which this task could not wait: {error}",
            StratagemWarning,
        )
