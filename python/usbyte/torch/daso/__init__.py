"""DASO: averages gradients inside a node in each step, parameters between nodes every B steps."""
