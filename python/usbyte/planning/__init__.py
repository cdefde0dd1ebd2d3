# SPDX-License-Identifier: Apache-2.0
"""Planning without torch: profiles of jobs, fitted costs, topologies, what-if tables, tuning."""
