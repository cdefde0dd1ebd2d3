"""Profilers of training jobs: they record the profile that plans are made from."""
