"""Loads the handwritten digits of `data/digits.npz` as torch datasets; `data/README.md` says where they are from."""

from pathlib import Path

import numpy
import torch
from torch.utils.data import TensorDataset

_FILE = Path(__file__).parent / "data" / "digits.npz"
_NUM_TRAIN = 1400


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1400 images to train on and 397 to test with, the same on every call.

    Each image is 1 x 8 x 8 with values from 0 to 1, each label a class from 0 to 9.
    """
    with numpy.load(_FILE) as arrays:
        images = torch.from_numpy(arrays["images"]).float().div(16).unsqueeze(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:_NUM_TRAIN], order[_NUM_TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])
