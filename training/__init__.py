"""Learns the embedding, measures it and exports it as a bundle; the only package with PyTorch."""
