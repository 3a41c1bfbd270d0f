"""Where variables live, and when replicas agree: one file for each strategy."""
