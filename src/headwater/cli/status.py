"""Exit statuses of commands, beside 0, 1 (an error) and 2 (wrong arguments)."""

from __future__ import annotations

OVER_THE_LIMIT = 3
"""`headwater explain`: more is lost than --fail-over allows."""
