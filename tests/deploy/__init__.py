"""Tests of the deployment files: each is checked against the service itself."""
