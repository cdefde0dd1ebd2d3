"""What happens when a rank fails: one verdict on all ranks, and parameters of one step."""
