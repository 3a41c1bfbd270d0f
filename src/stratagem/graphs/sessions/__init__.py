"""Runs graphs on the devices of this process and of a cluster."""
