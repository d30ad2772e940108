"""The caches that targets of the reference engine can have."""

from __future__ import annotations

from reference_models.engine import CacheSpec

CACHES: dict[str, CacheSpec] = {
    "rows": CacheSpec(),
    "int8": CacheSpec(storage="int8"),
    "affine8": CacheSpec(storage="affine8"),
    "affine4": CacheSpec(storage="affine4"),
    "paged-4": CacheSpec("paged", block=4),
    "rotating-6": CacheSpec("rotating", window=6),
    "rotating-9-sinks-3": CacheSpec("rotating", window=9, sinks=3),
    "rotating-layers": CacheSpec("rotating"),
    "chunked-5": CacheSpec("chunked", chunk=5),
    "rotating-300-sinks-3": CacheSpec("rotating", window=300, sinks=3),
    "rotating-300": CacheSpec("rotating", window=300),  # whose front can be trimmed
    "chunked-270": CacheSpec("chunked", chunk=270),
}
"""The caches that a target can have, by the name of their storage. What is in front of a hyphen is a kind of storage
for ``comparison.recut_tolerance``. ``rotating-layers``: those layers rotate that have a sliding window, in it."""
STORAGES = ("rows", "int8")
FAR = ("rotating-300-sinks-3", "chunked-270", "rotating-300")
"""Wider than the 256 slots by which a cache grows: small programs would not show them, see ``harness.far_machine``."""
KINDS = tuple(name for name in CACHES if name not in (*STORAGES, *FAR))
