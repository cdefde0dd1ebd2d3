# SPDX-License-Identifier: Apache-2.0
"""Eager collectives: matched by name across ranks, run one at a time, outside of the plan."""
