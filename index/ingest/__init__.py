"""Ingestion: sources of items and photos, and the re-indexing pipeline."""
