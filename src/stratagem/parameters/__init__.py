"""The parameter server: what workers and shards say to each other is in `protocol`."""
