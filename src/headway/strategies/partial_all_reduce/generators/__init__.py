"""Generators of groups: one rule a file. ``factory.generator_of`` finds them by name."""
