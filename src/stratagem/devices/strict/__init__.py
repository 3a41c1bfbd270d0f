"""Simulated accelerators that are devices of torch's own: strict devices."""
