"""Tells which parts of a batch are lists with one entry per example, and so differ in length."""

from typing import Any

from stratagem import _tree
from stratagem.inputs.splitting import is_leaf

_LEAF = 0


def common_template(one: Any, two: Any) -> Any:
    """What a batch of one example and a batch of two have in common, with a 0 at every leaf.

    `None` if their structures are the same, so that every batch tells its own.
    """
    template = _common(one, two)
    same = _shape(one) == _shape(two)
    return None if same else template


def _common(one: Any, two: Any) -> Any:
    # By hand: it goes into two batches at once, and stops where they differ.
    if type(one) is not type(two) or is_leaf(one):
        return _LEAF
    if isinstance(one, dict) and list(one) == list(two):
        return {key: _common(one[key], two[key]) for key in one}
    if isinstance(one, list | tuple) and len(one) == len(two):
        parts = [_common(*pair) for pair in zip(one, two, strict=True)]
        if _tree.is_namedtuple(one):
            return type(one)(*parts)
        return type(one)(parts) if type(one) in (list, tuple) else _LEAF
    return _LEAF


def _shape(batch: Any) -> Any:
    return _tree.structure(batch, is_leaf=is_leaf)
