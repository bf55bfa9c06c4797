"""HTTP clients of the service for Python programs: typed results, paging, and retries with back-off.

Needs httpx and pydantic, and imports neither an engine nor the web framework.
"""

from service.client.calls import ItemSearch, Photo, PhotoSearch
from service.client.clients import AsyncClient, Client
from service.client.errors import ServiceError, ServiceUnreachable

__all__ = ["AsyncClient", "Client", "ItemSearch", "Photo", "PhotoSearch", "ServiceError", "ServiceUnreachable"]
