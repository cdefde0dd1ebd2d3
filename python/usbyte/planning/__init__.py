"""Planning without torch: profiles of jobs, fitted costs, topologies, what-if tables, tuning."""
