"""Helpers that need neither torch nor the C++ core."""
