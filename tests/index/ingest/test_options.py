"""The options of a job: the command line and the API have the names, defaults and bounds of the one model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from index.ingest.options import CommonOptions, ReindexOptions
from lookalike import app
from service.schemas.jobs import JobBody

REQUIRED = {"source": ["catalogue.csv"], "gallery": "gallery", "bundle": "bundle"}
COMMAND: Any = typer.main.get_command(app).commands["reindex"]  # type: ignore[attr-defined]
PARAMETERS = {parameter.name: parameter for parameter in COMMAND.params}
OF_A_RUN = {"options_file", "as_json", "job", "wait"}
"""Parameters of the command that are not options of the job."""


def test_the_command_line_has_the_options_of_the_model() -> None:
    assert set(PARAMETERS) - OF_A_RUN - {"help"} == set(ReindexOptions.model_fields)
    for name, field in ReindexOptions.model_fields.items():
        parameter = PARAMETERS[name]
        assert parameter.help == field.description
        assert name == "source" or parameter.opts == [
            "--" + {"columns": "column", "lists": "list"}.get(name, name.replace("_", "-"))
        ]


@pytest.mark.parametrize("name", ["max_delete", "max_rejects", "expect_recall"])
def test_a_share_beyond_its_bounds_is_rejected_everywhere(name: str) -> None:
    for value in (-0.1, 1.1):
        for model, required in ((ReindexOptions, REQUIRED), (JobBody, {"source": "shop"})):
            with pytest.raises(ValidationError, match=name):
                model.model_validate({**required, name: value})
        line = ["reindex", "a.csv", "--gallery", "g", "--bundle", "b", f"--{name.replace('_', '-')}={value}"]
        ended = CliRunner().invoke(app, line)
        assert ended.exit_code == 2 and name.replace("_", "-") in ended.output


def test_the_command_line_without_options_gives_the_defaults_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from index.ingest import pipeline

    received: list[ReindexOptions] = []

    def stop(options: ReindexOptions, **_: Any) -> None:
        received.append(options)
        raise pipeline.Cancelled

    monkeypatch.setattr(pipeline, "run_reindex", stop)
    for arguments in ([], ["--max-delete", "0", "--column", "item_id=sku", "--attributes", "size,price"]):
        COMMAND.main(["catalogue.csv", "--gallery", "gallery", "--bundle", "bundle", *arguments], standalone_mode=False)
    plain, chosen = received
    assert plain == ReindexOptions.model_validate(REQUIRED)
    assert (chosen.max_delete, chosen.columns, chosen.attributes) == (0, {"item_id": "sku"}, ["size", "price"])


def test_the_api_takes_the_common_options_with_their_defaults() -> None:
    assert set(JobBody.model_fields) == set(CommonOptions.model_fields) | {"source", "bundle"}
    body = JobBody(source="shop")
    assert {name: getattr(body, name) for name in CommonOptions.model_fields} == CommonOptions().model_dump()


@pytest.mark.parametrize("model", [ReindexOptions, JobBody])
def test_queries_are_measured_with_or_without_an_expected_recall(model: type[CommonOptions]) -> None:
    required = REQUIRED if model is ReindexOptions else {"source": "shop"}
    with pytest.raises(ValidationError, match="expect_recall needs queries"):
        model.model_validate({**required, "expect_recall": 0.5})
    assert model.model_validate({**required, "queries": "q.csv"}).expect_recall is None
    assert model.model_validate({**required, "queries": "q.csv", "expect_recall": 0.5}).expect_recall == 0.5


@pytest.mark.parametrize("model", [ReindexOptions, JobBody])
@pytest.mark.parametrize("text", ["sizes", "=|", "sizes="])
def test_a_list_without_a_separator_is_rejected(model: type[CommonOptions], text: str) -> None:
    required = REQUIRED if model is ReindexOptions else {"source": "shop"}
    with pytest.raises(ValidationError, match="NAME=SEPARATOR"):
        model.model_validate({**required, "lists": [text]})
    assert model.model_validate({**required, "lists": ["sizes=="]}).lists == {"sizes": "="}


@pytest.mark.parametrize("text", ["item_id", "=sku", "item_id="])
def test_a_column_that_maps_nothing_is_rejected(text: str) -> None:
    with pytest.raises(ValidationError, match="NAME=COLUMN"):
        ReindexOptions.model_validate({**REQUIRED, "columns": [text]})


def test_options_survive_the_file_that_hands_them_to_a_process() -> None:
    options = ReindexOptions.model_validate(
        {
            **REQUIRED,
            "columns": ["item_id=sku"],
            "attributes": "a,b",
            "lists": ["a=|"],
            "max_delete": 0,
            "rejects": Path("bad.csv"),
        }
    )
    assert ReindexOptions.model_validate_json(options.model_dump_json()) == options


def test_the_model_is_imported_without_engines() -> None:
    code = "import sys, index.ingest.options; print(sorted({'numpy', 'faiss', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
