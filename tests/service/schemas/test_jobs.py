"""How jobs are returned: with times in ISO 8601, and without the absolute paths of the machine."""

import json

import pytest

from index.jobs import JobRecord
from service.schemas.jobs import JobStatus


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/shop/catalogue.csv", "catalogue.csv"),
        ("/data/a.csv, file:///data/b.csv, FILE:///data/c.csv", "a.csv, b.csv, c.csv"),
        ("No source at /data/shop/lost.csv. Give a table", "No source at lost.csv. Give a table"),
        ("See /data/gallery/jobs/7.rejects.csv for", "See 7.rejects.csv for"),
        ("[Errno 2] No such file: '/opt/x/python'", "[Errno 2] No such file: 'python'"),
        ("https://example.com/a/b.csv and s3://bucket/a/b.csv", "https://example.com/a/b.csv and s3://bucket/a/b.csv"),
        ("export/part-1.csv, ../shop/a.csv and/or b", "export/part-1.csv, ../shop/a.csv and/or b"),
        ("3 of 4 images, 12/s", "3 of 4 images, 12/s"),
    ],
)
def test_absolute_paths_are_shortened_to_file_names(text: str, shown: str) -> None:
    record = JobRecord(source=text, bundle_id="b" * 16, started=0, updated=0, message=text)
    status = JobStatus.of(record)
    assert (status.source, status.message) == (shown, shown)


def test_times_are_in_iso_8601_and_absent_texts_are_null() -> None:
    record = JobRecord(source="shop", bundle_id="b" * 16, started=1767225600, updated=1767225660.5)
    status = json.loads(JobStatus.of(record).model_dump_json())
    assert (status["started"], status["updated"]) == ("2026-01-01T00:00:00Z", "2026-01-01T00:01:00.500000Z")
    assert status["message"] is None
