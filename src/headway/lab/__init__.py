"""A cluster on one machine: shaped links, slow workers, failures."""
