"""`make gpu-test`: builds from source, tests and measures on a GPU, and writes a report."""
