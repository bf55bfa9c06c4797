"""Traces requests and their stages, and sends the spans to the collector that the standard OTEL_ variables name.

FastAPI makes the spans of requests; this module adds those of the stages and sends both. Without such a variable the
SDK is not imported and every call here does nothing.
"""

import logging
import os
from time import time_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing:
    """Makes spans with a provider; without one it does nothing."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("lookalike") if provider else None

    @classmethod
    def from_environment(cls) -> "Tracing":
        """Enables tracing when an endpoint is configured and the extra `otel` is installed."""
        if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
            return cls()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.warning('an OpenTelemetry endpoint is set, but spans are not sent; run: pip install "lookalike[otel]"')
            return cls()
        name = os.environ.get("OTEL_SERVICE_NAME", "lookalike")
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def for_fastapi(self) -> Any:
        """Returns the setting that makes FastAPI trace requests and nothing else: metrics and logs are our own."""
        return {
            "tracer_provider": self._provider,
            "tracing": self._provider is not None,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        }

    def stage(self, name: str, seconds: float, ago: float) -> None:
        """Records a stage of the running request after it ended."""
        if self._tracer is None:
            return
        end = time_ns() - int(ago * 1e9)
        self._tracer.start_span(name, start_time=end - int(seconds * 1e9)).end(end)

    def close(self) -> None:
        """Sends the remaining spans."""
        if self._provider:
            self._provider.shutdown()
