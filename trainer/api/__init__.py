"""HTTP API of training jobs."""
