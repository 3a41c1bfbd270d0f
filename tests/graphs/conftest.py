"""What tests of graphs have in common with those of placement."""

from tests.placement.conftest import gpus

__all__ = ["gpus"]
