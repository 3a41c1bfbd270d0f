"""What a session needs of a model, whichever library made it: steps, values, a state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stratagem.strategies.strategy import Strategy
from stratagem.training.estimator.hooks import SessionRunHook
from stratagem.training.estimator.run_config import RunConfig
from stratagem.training.estimator.specs import ModeKeys

Batch = tuple[Any, ...]


class Evaluation(ABC):
    """Adds up what the batches of an evaluation gave."""

    @abstractmethod
    def add(self, batch: Batch, results: Any) -> None:
        """Takes the results of one batch."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The loss and the metrics over all examples."""


class Model(ABC):
    """A model that was built for one mode and one strategy."""

    mode: ModeKeys
    module: torch.nn.Module
    optimizer: Any
    hooks: Sequence[SessionRunHook]

    @abstractmethod
    def begin(self) -> None:
        """Prepares for the first step."""

    @abstractmethod
    def run(self, batch: Batch) -> Any:
        """Takes a step on a global batch; what it gave, for the methods below."""

    @abstractmethod
    def loss(self, results: Any) -> float:
        """The loss of a step; `nan` where none is computed."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """That of the next step; `nan` without an optimizer."""

    @abstractmethod
    def evaluation(self) -> Evaluation:
        """A new evaluation."""

    @abstractmethod
    def predictions(self, results: Any) -> Any:
        """The predictions of a step for all examples, as tensors."""

    @abstractmethod
    def outputs(self, features: Any) -> dict[str, Any]:
        """What comes out for features, by the names of the signatures under which it is exported."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name."""

    @abstractmethod
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Changes some weights."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that changes in a training, for a checkpoint; `module` has the weights by name."""

    @abstractmethod
    def restore(self, path: str, state: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint, as far as the mode needs it.

        Raises:
            CheckpointMismatchError: The checkpoint is of another model or optimizer.
        """


class Maker(ABC):
    """Builds the model of an Estimator, once for each session."""

    max_parts: int
    """How many parts a batch has at most: features, labels, weights of the examples."""

    @abstractmethod
    def divider(self, strategy: Strategy) -> Strategy:
        """Who divides the batches that the model takes."""

    @abstractmethod
    def make(
        self, mode: ModeKeys, features: Any, labels: Any, params: dict[str, Any], config: RunConfig, strategy: Strategy
    ) -> Model:
        """The model; called in the strategy's scope."""
