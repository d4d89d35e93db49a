"""Estimates the needs of a run: parameters, memory of a device, and responses of a round.

The estimates are computed from sizes, without engine, device or weights. They say whether a setup
can fit, and what takes the memory. They are no measurements.
"""
