# SPDX-License-Identifier: Apache-2.0
"""The page with the timeline of a step, predicted and measured, and what it is drawn from."""
