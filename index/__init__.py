"""The core: images to vectors with ONNX Runtime, vectors to products with SQLite and FAISS."""
