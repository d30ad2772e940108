"""Targets: one module per kind of thing that can be judged."""
