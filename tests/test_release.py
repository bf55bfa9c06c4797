"""Tests of what a release needs: one version, release notes, valid workflows, a complete wheel."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.processes import lookalike

ROOT = Path(__file__).parent.parent
PACKAGES = ("index", "service", "training")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_version_is_the_same_everywhere() -> None:
    sections = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] == VERSION
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION
    assert lookalike("--version").stdout == f"lookalike {VERSION}\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a checkout whose changelog has a section of version 1.2.3, ready for release, and an older one."""
    (tmp_path / ".github").mkdir()
    shutil.copy(ROOT / ".github" / "release_notes.py", tmp_path / ".github")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    changelog = "# Changelog\n\n## [1.2.3] - 2026-01-31\n\n- Teapots.\n\n## [1.2.2] - 2026-01-01\n\n- Mugs.\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    return tmp_path


def release_notes(checkout: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / ".github" / "release_notes.py"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_notes_are_the_section_of_the_tag(checkout: Path) -> None:
    result = release_notes(checkout, "v1.2.3")
    assert (result.returncode, result.stdout) == (0, "- Teapots.\n")


@pytest.mark.parametrize(
    ("tag", "before", "after", "message"),
    [
        ("v1.2.4", "", "", "is not v1.2.3"),
        ("1.2.3", "", "", "is not v1.2.3"),
        ("v1.2.3", "2026-01-31", "unreleased", "dates 1.2.3 'unreleased'"),
        ("v1.2.3", "## [1.2.3]", "## [Unreleased]", "has no text under '## [1.2.3]"),
        ("v1.2.3", "- Teapots.\n", "", "has no text under '## [1.2.3]"),
    ],
)
def test_tag_that_is_not_ready_is_refused(checkout: Path, tag: str, before: str, after: str, message: str) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(before, after))
    result = release_notes(checkout, tag)
    assert (result.returncode, result.stdout) == (1, "")
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("schema", "files"),
    [("vendor.github-workflows", WORKFLOWS), ("vendor.dependabot", [ROOT / ".github" / "dependabot.yml"])],
)
def test_workflows_and_dependabot_match_their_schemas(schema: str, files: list[Path]) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed: run `make env`")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert files and result.returncode == 0, result.stdout


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_job_has_a_timeout_and_runs_targets_of_the_makefile(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    assert all("timeout-minutes" in job for job in jobs if "steps" in job)
    lines = [step["run"] for job in jobs for step in job.get("steps", []) if "run" in step]
    used = {target for line in lines if line.startswith("make ") for target in line.split()[1:]}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert used and used <= set(targets)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_build_stages_of_the_dockerfile(file: Path) -> None:
    stages = re.findall(r"^FROM .* AS ([\w-]+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    matrix = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]["images"]["strategy"]["matrix"]
    built = set(matrix.get("target") or [image["target"] for image in matrix["include"]])
    assert built <= set(stages)


def test_the_demo_image_serves_a_trained_shop_without_pytorch_and_is_not_the_default() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS ([\w-]+)$(.*?)(?=^FROM|\Z)", dockerfile, re.MULTILINE | re.DOTALL))
    bases = {name: base for base, name in re.findall(r"^FROM (\S+) AS ([\w-]+)$", dockerfile, re.MULTILINE)}
    assert (bases["demo-shop"], bases["demo"], bases["serve"]) == ("train", "service", "service")
    assert re.findall(r"--from=demo-shop .*/data/demo/(\w+) /data/(\w+)", stages["demo"]) == [
        ("gallery", "gallery"),
        ("examples", "examples"),
    ]
    assert "LOOKALIKE_OPEN=true" in stages["demo"]
    assert list(stages)[-1] == "serve" and "LOOKALIKE_OPEN" not in stages["serve"] + stages["service"]


def test_wheel_contains_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "lookalike.py"):
        shutil.copy(ROOT / name, source)
    expected = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    # Uses the setuptools of this environment: an isolated build would download one.
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, source], check=True)
    [wheel] = tmp_path.glob("*.whl")
    contents = set(zipfile.ZipFile(wheel).namelist())
    assert expected - contents == {"pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in contents - expected if ".dist-info/" not in name} == set()
    assert wheel.name == f"lookalike-{VERSION}-py3-none-any.whl"
