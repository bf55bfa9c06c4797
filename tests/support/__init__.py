"""Real but tiny bundles and galleries, so that tests of serving need neither PyTorch nor a training run."""
