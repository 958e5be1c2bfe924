"""Holdfast inside of other people's programs."""
