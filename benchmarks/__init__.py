"""What Holdfast's speed is measured with: ``make bench``. ``docs/performance.md`` says how, and what came out."""
