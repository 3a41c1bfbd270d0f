"""What is made in a scope is noted."""

import torch

from stratagem.objects.tracking import Tracker


def test_parameters_without_values_are_not_noted() -> None:
    tracker = Tracker()
    with tracker.watch():
        made = [torch.nn.Parameter(torch.empty(2, device=device)) for device in ("meta", "cpu")]
    assert [each is made[1] for each in tracker.take()] == [True]
