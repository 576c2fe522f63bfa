"""The version of Headway, stamped on every document it writes."""

__version__ = "0.2.0"
