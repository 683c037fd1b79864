"""Messages in, token ids and labelled segments out. Knows nothing of torch or of the cache."""
