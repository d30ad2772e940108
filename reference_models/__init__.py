"""Small, plain MLX models, and the cache engine that they run on.

One file per family; shared parts in ``rope``, ``moe`` and ``layers``; ``registry`` lists what can be built.
This package imports neither the harness nor Hypothesis, so that a model here reads like a model anywhere.
"""
