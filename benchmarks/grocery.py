"""Writes the photos of the Grocery Store Dataset (Klasson et al., MIT licence) as a table for `lookalike study`.

All 5,421 photos of its 81 products; products with an even class number are learned, the others measured, so that half
of the products are unseen and neighbouring varieties are on both sides.

    python benchmarks/grocery.py GroceryStoreDataset/dataset products.csv
"""

import argparse
import csv
from pathlib import Path


def read_photos(dataset: Path) -> list[dict[str, str]]:
    """Returns a row per photo of the data set's three parts."""
    with (dataset / "classes.csv").open(encoding="utf-8", newline="") as file:
        names = {int(row["Class ID (int)"]): row["Class Name (str)"] for row in csv.DictReader(file)}
    rows = []
    for part in ("train", "val", "test"):
        for line in (dataset / f"{part}.txt").read_text(encoding="utf-8").splitlines():
            path, number, _ = (field.strip() for field in line.split(","))
            split = "test" if int(number) % 2 else "train"
            rows.append({"item_id": names[int(number)], "image": str((dataset / path).resolve()), "split": split})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="its folder with classes.csv and train.txt")
    parser.add_argument("table", type=Path, help="the CSV to write")
    arguments = parser.parse_args()
    rows = read_photos(arguments.dataset)
    with arguments.table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for split in ("train", "test"):
        own = [row["item_id"] for row in rows if row["split"] == split]
        print(f"{split}: {len(own)} photos of {len(set(own))} products")


if __name__ == "__main__":
    main()
