"""What a cache refuses to do; the one that raises it is unchanged."""


class CannotTrim(RuntimeError):
    """Keys that would have to stay, or to come back, are gone; the cache that raises it is unchanged."""


class CannotQuantise(ValueError):
    """Rows cannot be stored so, or are stored otherwise than as given already."""
