"""Codecs as users name them, and what they remember between steps."""
