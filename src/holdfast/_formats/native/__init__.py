"""Holdfast's own format, as docs/format.md describes it: record, columns, values, data files."""
