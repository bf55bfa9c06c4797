"""API keys, their scopes and their rate limit."""
