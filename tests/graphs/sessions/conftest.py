"""What tests of sessions on a cluster have in common with those of clusters."""

from tests.cluster.conftest import no_starter

__all__ = ["no_starter"]
