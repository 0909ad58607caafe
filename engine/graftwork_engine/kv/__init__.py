"""Bookkeeping of paged key and value blocks and their prefix cache. Refuses to know tensors."""
