"""Holdfast's own format, as docs/format.md describes it: record, values, data files with their tables, index."""
