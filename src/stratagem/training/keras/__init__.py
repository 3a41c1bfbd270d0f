"""Keras models: their own loop in the main program, their steps on the replicas."""
