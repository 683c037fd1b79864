"""Numbers about a running engine."""
