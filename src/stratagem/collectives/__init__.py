"""How replicas exchange tensors; what every collective does is in `collective`."""
