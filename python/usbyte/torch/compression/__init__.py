# SPDX-License-Identifier: Apache-2.0
"""Codecs of gradients, and the codec state between steps."""
