"""Readers: what other tools recorded, as Headway's events. One folder or file a format; ``importing`` joins ranks."""
