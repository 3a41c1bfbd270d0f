"""What tests of sessions on a cluster have in common with those of clusters."""

from tests.cluster.conftest import known_token, module_token, no_starter

__all__ = ["known_token", "module_token", "no_starter"]
