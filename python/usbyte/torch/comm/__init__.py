# SPDX-License-Identifier: Apache-2.0
"""Communicators that run the ops of a plan, and probes that measure their cost."""
