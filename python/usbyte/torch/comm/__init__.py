# SPDX-License-Identifier: Apache-2.0
"""Communicators that carry out a plan's operations, and measurements of their cost."""
