"""FAISS generations: immutable, memory-mapped indexes of one bundle's vectors."""
