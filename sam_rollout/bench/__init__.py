"""Measurements that an installed package can repeat on the machine at hand."""
