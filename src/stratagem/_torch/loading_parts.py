"""Parts of a DataLoader."""

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = ["DataLoaderIterator", "pin_memory"]
