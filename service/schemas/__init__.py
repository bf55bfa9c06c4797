"""The wire types of the HTTP API; they import neither FastAPI nor an engine."""
