"""Vector search over what the store holds; derived from it and disposable."""
