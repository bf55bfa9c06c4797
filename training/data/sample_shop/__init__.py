"""A sample shop of drawn products: enough photos to train, index and search without a download.

Twelve families of products are built as surfaces and photographed by a small renderer (numpy and Pillow only);
every photo follows from the seed.
"""

from training.data.sample_shop.products import Product, design_products
from training.data.sample_shop.shop import ShopPhoto, read_shop, render_photo, write_shop

__all__ = ["Product", "ShopPhoto", "design_products", "read_shop", "render_photo", "write_shop"]
