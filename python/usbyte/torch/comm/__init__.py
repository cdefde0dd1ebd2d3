"""Communicators that carry out a plan's operations, and measurements of their cost."""
