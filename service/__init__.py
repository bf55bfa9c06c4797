"""The service: search by photo over HTTP, and its web page."""
