"""Runs a call on all replicas: recipes, steps, agreement."""
