"""Writes the course of a training for TensorBoard.

Without the package `tensorboard` nothing is written, and the log says so.
"""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from typing import Any, final

from stratagem.training.estimator.hooks import RunContext, RunValues, SessionRunHook

_log = logging.getLogger("stratagem")


@contextlib.contextmanager
def summary_writer(folder: str, global_step: int | None = None) -> Iterator[Any]:
    """A writer of event files, closed after the block; `None` without TensorBoard.

    Args:
        folder: Where they lie.
        global_step: Where a training starts; what an earlier one wrote of later steps is not shown any more.
    """
    if importlib.util.find_spec("tensorboard") is None:
        _log.info("no summaries are written to %s: install tensorboard", folder)
        yield None
        return
    # Only when it is needed: it takes a second to load.
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        folder, purge_step=None if global_step is None else global_step + 1
    )
    try:
        yield writer
    finally:
        writer.close()


def write_scalars(writer: Any, scalars: Mapping[str, Any], global_step: int) -> None:
    """Writes numbers under their names; what is no number is left out."""
    for name, value in scalars.items():
        if writer is not None and isinstance(value, int | float):
            writer.add_scalar(name, value, global_step)


@final
class SummarySaverHook(SessionRunHook):
    """Writes loss and learning rate every so many steps.

    Args:
        writer: Where to, made by `summary_writer`.
        save_steps: After how many steps.
    """

    def __init__(self, writer: Any, save_steps: int) -> None:
        self._writer = writer
        self._save_steps = save_steps

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        step = run_context.global_step
        if step % self._save_steps == 0 or step == 1:
            scalars = {"loss": run_values.loss, "learning_rate": run_values.learning_rate}
            write_scalars(self._writer, scalars, step)
