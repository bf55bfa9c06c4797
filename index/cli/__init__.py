"""The commands of galleries and re-indexing."""
