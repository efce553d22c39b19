"""KV connectors: where blocks go when they leave the pool, and whence they come back."""
