"""Data sets: where photos come from, how they are described and how batches are drawn from them."""
