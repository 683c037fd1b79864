"""Plain functions on tensors; they import nothing of prefixkv."""
