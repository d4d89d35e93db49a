"""Estimates the needs of a run: parameters, memory of a device, and responses of a round."""
