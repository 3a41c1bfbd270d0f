"""Trains, evaluates and uses models that a function describes, with checkpoints."""
