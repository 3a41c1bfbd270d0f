"""The parameter server: variables that many workers read and update, each at its own pace.

- `contract`: what is said between whoever holds variables and the workers
- `partitioning`: which variable, or which of its rows, lies in which shard
- `shard`: one ps task's part of all variables; no transport
"""
