"""The version of Holdfast."""

__version__ = "0.1.0"
