"""Scales losses by the global batch, for programs that sum gradients themselves (`gradients="sum"`)."""

import torch

from stratagem.engine import context
from stratagem.errors import StrategyError


def compute_average_loss(
    per_example_loss: torch.Tensor,
    global_batch_size: int | None = None,
    sample_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of a replica's losses divided by the size of the global batch.

    Summed over replicas it is the mean over the global batch, whatever share each replica had.

    Args:
        per_example_loss: One loss for each example of this replica.
        global_batch_size: By default this replica's number of examples times the replicas.
        sample_weight: One weight for each example.
    Example:
        >>> compute_average_loss(torch.tensor([1.0, 3.0]), global_batch_size=4)
        tensor(1.)
    """
    if sample_weight is not None:
        per_example_loss = per_example_loss * sample_weight
    if global_batch_size is None:
        replica = context.get_replica_context()
        global_batch_size = len(per_example_loss) * (replica.num_replicas_in_sync if replica else 1)
    if type(global_batch_size) is not int or global_batch_size < 1:
        raise StrategyError(f"global_batch_size must be a whole number from 1 up, got {global_batch_size!r}")
    return per_example_loss.sum() / global_batch_size
