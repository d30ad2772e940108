"""What a cache refuses to do."""


class CannotTrim(RuntimeError):
    """Keys that would have to stay, or to come back, are gone; the cache that raises it is unchanged."""
