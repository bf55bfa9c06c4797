"""The source of truth of a gallery: items, images, vectors, bundles and jobs."""
