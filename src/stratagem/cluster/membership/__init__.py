"""Tasks meet, share values and notice who is gone."""
