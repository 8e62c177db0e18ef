"""Doors for people: `python -m tools.NAME`. Nothing imports them."""
