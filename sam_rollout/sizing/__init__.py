"""Estimates a run's needs: parameters, memory of a device, responses of a generation round."""
