"""The ranks of a run, process sets, and checks that ranks agree."""
