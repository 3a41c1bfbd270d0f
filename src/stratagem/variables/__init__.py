"""Where tensors lie, and how an update reaches all replicas."""
