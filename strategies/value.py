"""The base of every record: an immutable value, read strictly from JSON or TOML."""

import msgspec


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what crosses a door: immutable, keyword-only; reading one refuses unknown keys and wrong types."""
