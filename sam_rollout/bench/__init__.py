"""Measurements that an installed package can repeat on any machine."""
