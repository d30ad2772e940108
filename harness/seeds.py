"""Seeds of their own for the parts of a run."""

from __future__ import annotations

import hashlib


def derive_seed(base: int, *names: object) -> int:
    """A seed of its own for every family and round: with one seed for all, all would run the same programs."""
    text = "\0".join(str(part) for part in (base, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
