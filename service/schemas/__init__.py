"""The types of requests and responses on the wire."""
