"""What sources are made of; no source of its own."""
