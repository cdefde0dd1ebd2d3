"""An emulated cluster on one machine (`netns.sh`) and benchmarks that run on it."""
