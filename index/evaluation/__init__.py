"""Retrieval metrics on exact ranks."""
