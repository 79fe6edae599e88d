"""How far the settings of an engine may go. Kept apart so that they can be checked at no cost."""

DEPTH_MAX = 4096
"""Requests in flight on one ring."""
WORKERS_MAX = 256
"""Threads of one device."""
