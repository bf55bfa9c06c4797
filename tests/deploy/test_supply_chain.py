"""Actions, images and packages are pinned by digest, so that nobody can exchange them under the same name."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
REQUIREMENTS = sorted((ROOT / "deploy" / "requirements").glob("*.txt"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OWN_IMAGES = {"lookalike", "lookalike:local", "lookalike:train", "lookalike:gpu", "lookalike:cluster"}
"""Images that are built from this repository, or replaced by a release of it."""
DIGEST = re.compile(r"docker\.io/[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(path: Path) -> dict[str, str]:
    pinned = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in pinned}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_by_commit_with_their_version(file: Path) -> None:
    lines = re.findall(r"\buses: *(.*)", file.read_text(encoding="utf-8"))
    assert lines
    for line in lines:
        assert line.startswith("./") or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_an_action_has_one_commit_in_all_workflows() -> None:
    pins = {pin for file in WORKFLOWS for pin in re.findall(r"([\w-]+/[\w-]+)(@.*)", file.read_text(encoding="utf-8"))}
    assert len({name for name, _ in pins}) == len(pins)


def test_base_images_are_pinned_by_digest() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(stages) == len(re.findall("^FROM ", DOCKERFILE, re.MULTILINE))
    arguments = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", DOCKERFILE, re.MULTILINE))
    names = {name for _, name in stages}
    for reference, _ in stages:
        image = re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], reference)
        assert image in names or DIGEST.fullmatch(image), image
    assert set(re.findall(r"--from=(\S+)", DOCKERFILE)) <= names


def test_images_of_compose_and_kubernetes_are_pinned_by_digest() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    images = {re.sub(r"\$\{\w+:-(.*)\}", r"\1", service["image"]) for service in compose["services"].values()}
    for file in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        images.update(re.findall(r"\bimage: *(\S+)", file.read_text(encoding="utf-8")))
    assert images > OWN_IMAGES
    assert all(DIGEST.fullmatch(image) for image in images - OWN_IMAGES)


def test_dependabot_updates_actions_and_images() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    watched = {(update["package-ecosystem"], update["directory"]) for update in updates}
    assert watched == {("github-actions", "/"), ("docker", "/"), ("docker-compose", "/deploy")}


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_requirements_of_the_images_have_digests_and_the_tested_versions(file: Path) -> None:
    tested = versions(ROOT / "constraints.txt")
    untested = {name for name in versions(file) if name not in tested}
    assert not {name for name, version in versions(file).items() if tested.get(name, version) != version}
    # Packages for NVIDIA's GPUs are pinned in these files only: the tests run without a GPU.
    assert all(re.match(r"(nvidia|cuda)-|\w+-gpu$", name) for name in untested)
    pinned = re.compile(r"#.*|[\w.-]+==\S+( ; [^-]+)?( --hash=sha256:[0-9a-f]{64})+")
    for line in re.sub(r" *\\\n *", " ", file.read_text(encoding="utf-8")).splitlines():
        assert pinned.fullmatch(line), line


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("serve", ["cpu", "heic"]),
        ("serve-gpu", ["gpu", "heic"]),
        ("train", ["cpu", "heic", "train"]),
        *((extra, [extra]) for extra in ("cluster", "otel", "parquet", "remote")),
    ],
)
def test_requirements_contain_what_the_project_needs(name: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + [each for extra in extras for each in project["optional-dependencies"][extra]]
    names = {canonical(found[0]) for each in needed if (found := re.match(r"[\w.-]+", each))}
    pinned = versions(ROOT / "deploy" / "requirements" / f"{name}.txt")
    assert names <= set(pinned), "run `make lock`"


def test_images_install_only_files_with_known_digests() -> None:
    installs = re.findall(r"-m pip (?:--python \S+ )?install (.*(?:\\\n.*)*)", DOCKERFILE)
    assert len(installs) == 5
    for install in installs:
        assert "--require-hashes --only-binary :all:" in install or "--no-deps --no-build-isolation" in install
    named = set(re.findall(r"(?:'--requirement %s.txt ' |--requirement )([\w-]+)", DOCKERFILE))
    assert {file.stem for file in REQUIREMENTS} == named | {"cluster", "otel", "parquet", "remote"}
