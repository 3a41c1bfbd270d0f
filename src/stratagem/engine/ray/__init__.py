"""Replicas that are actors of Ray."""
