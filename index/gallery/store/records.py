"""The records of jobs, as the stores keep them."""

from pydantic import ValidationError

from index.jobs import JobRecord

DAMAGED = "The record of this job is damaged."


def parse_record(job_id: int, text: str) -> JobRecord:
    """Parses a record; a damaged one counts as failed, because the history must not stop later jobs."""
    try:
        return JobRecord.model_validate_json(text).model_copy(update={"id": job_id})
    except ValidationError:
        return JobRecord(id=job_id, source="", bundle_id="", state="failed", started=0, updated=0, message=DAMAGED)
