"""Questions between the ranks of a job: over its own interface, authenticated by a secret from its store."""
