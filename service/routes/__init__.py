"""What the service answers, one module for each part of the API."""
