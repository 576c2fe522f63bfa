"""Decentralised training: ranks average their models in groups, not their gradients over all."""
