"""Traces: what happened, told once, as events; and the folds over them."""
