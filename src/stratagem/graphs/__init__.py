"""Recorded graphs and sessions, for programs of TensorFlow 1."""
