"""The state of the service, for people and for probes."""

import httpx


def test_status_reports_gallery_model_and_limits(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    assert (status["gallery"]["items"], status["gallery"]["images"]) == (8, 16)
    assert (status["bundle"]["backbone"], status["bundle"]["dimension"]) == ("colour_grid", 48)
    assert status["bundle"]["metrics"] == {"recall@1": 0.9}
    assert status["bundle"]["untrained_metrics"] == {"recall@1": 0.5}
    assert status["provider"].endswith("ExecutionProvider")
    assert status["limits"] == {"max_body_bytes": 300_000, "max_pixels": 1_000_000, "max_batch": 16}


def test_probes_answer(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}
