"""Bookkeeping of blocks: ids, keys, reference counts. Never touches a tensor."""
