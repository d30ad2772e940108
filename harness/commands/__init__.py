"""Groups of commands, one module each, and the error that all of them raise for input that cannot be used."""


class UsageError(Exception):
    """Input that cannot be used; the message is one line."""
