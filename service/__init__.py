"""The service: search by photo over HTTP, and the page that people use it with."""
