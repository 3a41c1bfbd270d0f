"""The parameter server of one machine: variables in memory that all workers share."""
