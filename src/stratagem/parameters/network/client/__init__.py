"""The side of a worker: push, pull, wait."""
