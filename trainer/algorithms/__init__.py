"""Algorithms: groups in, advantages out. They know no model."""
