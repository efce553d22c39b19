"""Runners: what turns a ScheduledStep into a StepResult. Only modules named torch_* import torch."""
