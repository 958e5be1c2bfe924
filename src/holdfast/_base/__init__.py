"""What everything may use: threads, sizes, patterns, texts, warnings, numbers that speed depends on."""
