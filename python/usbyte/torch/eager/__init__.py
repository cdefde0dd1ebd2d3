"""Collectives outside of the plan: negotiated by name, one after another, among any ranks."""
