"""Starts a program as the tasks of a cluster: what `stratagem run` does."""
