"""Who takes part, as each starter says it."""
