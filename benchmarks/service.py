"""Requests per second of the service; what it measures is in `_serving.py`, since this name is a package's too."""

from _serving import main

if __name__ == "__main__":
    main()
