"""Prints the section of CHANGELOG.md of a release, if its tag matches the checkout.

Usage: python .github/release_notes.py v1.2.3
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(tag: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"The tag {tag} is not v{version} of pyproject.toml. Change the version, commit and tag again.")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## \[{re.escape(version)}\] - ([^\n]+)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if section is None or not section[2].strip():
        sys.exit(f"CHANGELOG.md has no text under '## [{version}] - DATE'. Add the changes, commit and tag again.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        sys.exit(f"CHANGELOG.md dates {version} '{section[1]}'. Write the date as 2026-01-31, commit and tag again.")
    print(section[2].strip())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("The tag is missing. Usage: python .github/release_notes.py v1.2.3")
    main(sys.argv[1])
