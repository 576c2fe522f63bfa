"""Cluster files that ship; each says where its numbers are from."""
