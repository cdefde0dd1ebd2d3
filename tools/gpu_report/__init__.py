"""`make gpu-test`: builds from source, checks everything on this machine's GPU, writes a report."""
