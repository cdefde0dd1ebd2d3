"""From a job's measured times to one plan on all ranks, and its life cycle."""
