# SPDX-License-Identifier: Apache-2.0
"""Profilers of training jobs: they record the profile that plans are made from."""
