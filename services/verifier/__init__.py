"""Verifier: judges completions in isolated worker processes."""
