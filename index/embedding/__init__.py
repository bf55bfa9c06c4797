"""Images to vectors: the bundle, the image path and the embedder."""
