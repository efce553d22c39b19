"""The scheduler: what runs in the next step, and what becomes of the step's output."""
