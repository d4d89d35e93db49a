"""Small modules that every other package may import: settings, identity, limits, metrics."""
