# SPDX-License-Identifier: Apache-2.0
"""From a job's measured times to one plan on all ranks, and its life cycle."""
