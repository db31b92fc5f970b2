"""The error of this package."""


class GrammarError(Exception):
    """A grammar that cannot be used; the text says why."""
