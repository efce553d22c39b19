"""The paged KV cache as the scheduler sees it: block ids, hashes, tables, and the fence before the pool."""
