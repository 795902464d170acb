"""HTTP API of the trainer: jobs, events, checkpoints, metrics."""
