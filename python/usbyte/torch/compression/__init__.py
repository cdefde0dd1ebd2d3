"""Codecs of gradients, and the codec state between steps."""
