"""Runs `_serving.py`; a separate file, because a package has the name `service` too."""

from _serving import main

if __name__ == "__main__":
    main()
