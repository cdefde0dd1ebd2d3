# SPDX-License-Identifier: Apache-2.0
"""Faults: one fault verdict on all ranks, and protection from parameters of a partial step."""
