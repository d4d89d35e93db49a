"""Makes an engine's drafts between two forward passes of the model."""
