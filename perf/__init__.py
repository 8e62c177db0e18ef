"""How a strategy is measured and judged. Imports strategies; nothing in here is imported by them."""
