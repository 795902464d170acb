"""Allocator: decides how many rollouts a prompt is worth, and buys them."""
