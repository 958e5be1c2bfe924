"""Files as bytes and back: one folder per format, each with a reader that opens it as a Source."""
