"""Rebuilds what can be rebuilt of a damaged checkpoint from its data files, and removes what killed saves left."""
