"""A vector index on a Qdrant cluster: shards and replicas, for more vectors than one machine holds."""
