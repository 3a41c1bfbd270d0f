"""Distributed objects: named, tracked, sent to replicas and kept up to date."""
