"""What every room may import: settings, identity, limits, metrics and other small values."""
