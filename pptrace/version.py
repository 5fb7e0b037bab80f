"""The version, and its only source."""

__version__ = "0.1.0"
