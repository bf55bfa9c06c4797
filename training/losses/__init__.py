"""Metric-learning losses: Proxy-ISA, its peers, and the registry that makes them by name."""
