"""Compression of gradients: codecs as values, what they send, and what computes it. One file a codec."""
