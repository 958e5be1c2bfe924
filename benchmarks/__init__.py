"""What Holdfast's speed is measured with: ``make bench``. ``docs/performance.md`` tells how, and what came out."""
