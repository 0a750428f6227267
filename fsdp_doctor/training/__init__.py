"""The training step that is profiled: workload, strategies, the step itself. Imports torch."""
