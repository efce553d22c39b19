"""Experiments on the engine: workloads, plans and comparisons. The core knows nothing of them."""
