"""Small but real bundles and galleries, so that tests of the service need neither PyTorch nor a training run."""
