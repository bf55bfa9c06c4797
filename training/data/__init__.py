"""Data sets: where photos come from, their classes and splits, and how batches are drawn from them; without PyTorch."""

from training.data.dataset import DataSet, Photo
from training.data.registry import default_shop, load_data, load_search, shop_data
from training.data.validation import check_photos

__all__ = ["DataSet", "Photo", "check_photos", "default_shop", "load_data", "load_search", "shop_data"]
