"""Runs each step on a free worker: the asynchronous half of the engine."""
