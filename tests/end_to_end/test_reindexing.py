"""Re-indexing as an operator runs it: real processes that are killed, stopped and watched while others search."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.embedding.bundle import Bundle
from index.gallery import open_gallery
from index.ingest.pipeline import DEFAULT_SETTINGS
from tests.support.processes import lookalike
from tests.support.tiny_bundle import make_tiny_bundle
from tests.support.tiny_gallery import COLOURS, make_tiny_gallery, write_tiny_source

IMAGES = 1500
WATCH = """
import json, sys
from collections import Counter
from pathlib import Path
from index.embedding.bundle import Bundle
from index.embedding.embedder import Embedder
from index.gallery import open_gallery
from index.embedding.images import load_pixels

gallery, stop, photo, *bundles = map(Path, sys.argv[1:])
opened = open_gallery(gallery)
vectors = {}
for folder in bundles:
    bundle = Bundle.load(folder)
    pixels = load_pixels(photo.read_bytes(), bundle.preprocessing)
    vectors[bundle.id] = Embedder(bundle, threads=1).embed(pixels[None])
old = next(iter(vectors))
answers, lives = Counter(), []
while not stop.exists():
    live = opened.active_bundle()
    if live not in lives:
        lives.append(live)
    for name in {old, live}:
        found = opened.search(vectors[name], bundle_id=name, top=8)
        hits = [[hit.item.id, round(hit.score, 3)] for hit in found.hits[0]]
        answers[json.dumps([name, found.bundle_id, hits])] += 1
    if sum(answers.values()) <= 2:
        print("searching", flush=True)
print(json.dumps({"lives": lives, "answers": [[*json.loads(text), count] for text, count in answers.items()]}))
"""
"""Searches with the first bundle and with the active one until it is stopped; prints every different result."""


def write_many(directory: Path) -> Path:
    """Writes a table of so many images that a job over them can be interrupted."""
    write_tiny_source(directory)
    table = directory / "many.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["item_id", "image", "image_id", "colour"])
        for n in range(IMAGES):
            colour = COLOURS[n // 3 % 8]
            writer.writerow([f"item-{n // 3}", f"{colour}-{n % 2}.jpg", n, colour])
    return table


@contextmanager
def running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Runs a job with its progress as JSON lines; it is embedding when the context is entered."""
    command = [sys.executable, "-m", "lookalike", "reindex", *map(str, arguments), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            next_progress(process)
            yield process
        finally:
            process.kill()


def next_progress(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the next record with an image done."""
    assert process.stdout and process.stderr
    for line in process.stdout:
        record: dict[str, Any] = json.loads(line)
        if record["done"]:
            return record
    raise AssertionError(f"the job ended: {process.stderr.read()}")


def wait_for_end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Waits for the end of a process; returns its last record and its standard error."""
    out, errors = process.communicate(timeout=60)
    lines = [line for line in out.splitlines() if line.endswith("}")]  # a kill may cut the last line
    return json.loads(lines[-1]) if lines else {}, errors


def vectors_of(gallery: Path) -> dict[tuple[str, str], bytes]:
    """Returns all that searches use: item, image, digest and vector."""
    opened = open_gallery(gallery)
    live = opened.active_bundle()
    assert live
    found = {}
    for item_id in dict.fromkeys(item_id for item_id, _ in opened.image_ids()):
        digests = opened.digests(item_id, live)
        for image_id, vector in opened.item_vectors(item_id, live).items():
            found[item_id, image_id] = digests[image_id].encode() + np.round(vector, 2).tobytes()
    opened.close()
    return found


def states(gallery: Path) -> list[str]:
    ended = lookalike("jobs", "--gallery", gallery, "--json")
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line)["state"] for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_a_job_killed_at_random_moments_continues_where_it_stopped(tmp_path: Path) -> None:
    table, bundle = write_many(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    arguments = (table, "--gallery", tmp_path / "killed", "--bundle", bundle, "--rejects", tmp_path / "rejects.csv")
    reported = 0
    kills = 3
    delays = random.Random(0)
    for _ in range(kills):
        with running(*arguments) as process:
            record = next_progress(process)
            time.sleep(delays.random() / 10)
            os.kill(process.pid, signal.SIGKILL)
            last, _ = wait_for_end(process)
            reported += (last or record)["embedded"]
            assert process.returncode == -signal.SIGKILL
    assert states(tmp_path / "killed") == ["interrupted"] * kills
    final = lookalike("reindex", *arguments, "--json")
    assert final.returncode == 0, final.stderr
    record = json.loads(final.stdout.splitlines()[-1])
    assert record["embedded"] + record["unchanged"] == IMAGES
    assert IMAGES - kills * DEFAULT_SETTINGS.chunk_size <= reported + record["embedded"] <= IMAGES, (
        "what was written is not embedded again"
    )
    lookalike("reindex", table, "--gallery", tmp_path / "complete", "--bundle", bundle)
    assert vectors_of(tmp_path / "killed") == vectors_of(tmp_path / "complete")
    verified = lookalike("gallery", "verify", tmp_path / "killed")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_stops_the_job_after_its_batch(tmp_path: Path, number: signal.Signals) -> None:
    table, bundle = write_many(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    arguments = (table, "--gallery", tmp_path / "gallery", "--bundle", bundle, "--rejects", tmp_path / "rejects.csv")
    with running(*arguments) as process:
        process.send_signal(number)
        stopped, errors = wait_for_end(process)
    assert (process.returncode, stopped["state"]) == (130, "cancelled")
    assert "Run the same command again" in errors and "Traceback" not in errors
    final = lookalike("reindex", *arguments, "--json")
    record = json.loads(final.stdout.splitlines()[-1])
    assert (record["state"], stopped["embedded"] + record["embedded"]) == ("done", IMAGES)
    assert record["unchanged"] == stopped["embedded"] > 0, "all that it reported was kept"


@pytest.mark.slow
def test_another_process_watches_and_stops_a_job(tmp_path: Path) -> None:
    table, bundle = write_many(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    arguments = (table, "--gallery", tmp_path / "gallery", "--bundle", bundle, "--rejects", tmp_path / "rejects.csv")
    with running(*arguments) as process:
        # Paused, so that it still runs when the other processes look at it.
        process.send_signal(signal.SIGSTOP)
        assert states(tmp_path / "gallery") == ["running"]
        cancelled = lookalike("jobs", "--gallery", tmp_path / "gallery", "--cancel", "1")
        assert cancelled.returncode == 0 and "Job 1 stops" in cancelled.stdout
        process.send_signal(signal.SIGCONT)
        wait_for_end(process)
    assert process.returncode == 130
    assert states(tmp_path / "gallery") == ["cancelled"]
    again = lookalike("jobs", "--gallery", tmp_path / "gallery", "--cancel", "1")
    assert again.returncode == 1 and "it is cancelled" in again.stderr
    history = lookalike("jobs", "--gallery", tmp_path / "gallery").stdout
    assert f"of {IMAGES} images" in history and "Run the same command again" in history


def test_columns_attributes_and_folders_are_chosen_on_the_command_line(tmp_path: Path) -> None:
    source, bundle = write_tiny_source(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    table = tmp_path / "elsewhere.csv"
    table.write_text(source.read_text().replace("item_id,image", "sku,photo"))
    arguments = (table, "--gallery", tmp_path / "gallery", "--bundle", bundle, "--rejects", tmp_path / "rejects.csv")
    wrong = lookalike("reindex", *arguments)
    assert wrong.returncode == 1
    assert "no column 'item_id' and no 'image'; it has sku, photo, title, category" in wrong.stderr
    mapped = (*arguments, "--column", "item_id=sku", "--column", "image=photo", "--attributes", "colour,price")
    unread = lookalike("reindex", *mapped)
    assert unread.returncode == 1 and "None of the 16 images" in unread.stderr
    done = lookalike("reindex", *mapped, "--images", tmp_path / "source")
    assert done.returncode == 0, done.stderr
    assert "16 photos embedded, 0 unchanged, 0 rejected, 0 deleted" in done.stdout
    assert states(tmp_path / "gallery") == ["done", "failed", "failed"]
    opened = open_gallery(tmp_path / "gallery")
    stored = opened.get_item("ball-red")
    opened.close()
    assert stored and stored.item.attributes == {"colour": "red", "price": 4.5}


def test_bad_photos_are_reported_by_exit_code_and_file(tmp_path: Path) -> None:
    source, bundle = write_tiny_source(tmp_path / "source"), make_tiny_bundle(tmp_path / "bundle")
    (source.parent / "red-0.jpg").write_bytes((source.parent / "red-0.jpg").read_bytes()[:-200])
    (source.parent / "cyan-1.jpg").unlink()
    rejects = tmp_path / "bad.csv"
    arguments = (source, "--gallery", tmp_path / "gallery", "--bundle", bundle, "--rejects", rejects)
    done = lookalike("reindex", *arguments)
    assert done.returncode == 3 and str(rejects) in done.stderr
    with rejects.open() as file:
        rows = {row["item_id"]: row for row in csv.DictReader(file)}
    assert [*rows["ball-red"]] == ["item_id", "image_id", "place", "reason", "problem"]
    assert {name: row["reason"] for name, row in rows.items()} == {"ball-red": "truncated", "ball-cyan": "unreadable"}
    assert rows["ball-cyan"]["place"] == str(source.parent / "cyan-1.jpg")
    failed = lookalike("reindex", *arguments, "--max-rejects", "0.1")
    assert failed.returncode == 1 and "2 of 16 images were rejected" in failed.stderr
    assert states(tmp_path / "gallery") == ["failed", "partial"]


@contextmanager
def searching(tmp_path: Path, *bundles: Path) -> Iterator[dict[str, Any]]:
    """Runs a process that searches during the context; yields a dict that holds its results afterwards."""
    stop = tmp_path / "stop"
    photo = tmp_path / "gallery-source" / "blue-0.jpg"
    command = [sys.executable, "-c", WATCH, *map(str, (tmp_path / "gallery", stop, photo, *bundles))]
    seen: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and "searching" in process.stdout.readline()
        try:
            yield seen
        finally:
            stop.touch()
            out = process.communicate(timeout=60)[0]
        assert process.returncode == 0, "no search failed"
        seen.update(json.loads(out.splitlines()[-1]))


@pytest.mark.slow
def test_a_new_bundle_is_activated_during_searches_without_a_failed_or_mixed_result(tmp_path: Path) -> None:
    old, new = make_tiny_bundle(tmp_path / "old"), make_tiny_bundle(tmp_path / "new", grid=8)
    gallery = make_tiny_gallery(tmp_path / "gallery", old)
    table = tmp_path / "gallery-source" / "catalogue.csv"
    names = [Bundle.load(path).id for path in (old, new)]
    queries = tmp_path / "queries.csv"
    queries.write_text(f"item_id,image\nball-blue,{tmp_path}/gallery-source/blue-1.jpg\nball-red,blue-0.jpg\n")
    (tmp_path / "blue-0.jpg").write_bytes((table.parent / "blue-0.jpg").read_bytes())
    command = ("reindex", table, "--gallery", gallery, "--bundle", new, "--rejects", tmp_path / "rejects.csv")
    with searching(tmp_path, old, new) as seen:
        refused = lookalike(*command, "--queries", queries, "--expect-recall", "0.9")
        assert refused.returncode == 1 and "0.5000, below 0.9000; the bundle was not activated" in refused.stderr
        moved = lookalike(*command, "--queries", queries, "--expect-recall", "0.5")
        assert moved.returncode == 0 and "0 photos embedded, 16 unchanged" in moved.stdout, moved.stderr
        back = lookalike("gallery", "rollback", gallery)
        assert back.returncode == 0 and f"Bundle {names[0]} is active again" in back.stdout
    assert seen["lives"] == names
    by_bundle = {
        name: [(made_by, hits) for bundle, made_by, hits, _ in seen["answers"] if bundle == name] for name in names
    }
    for name, answers in by_bundle.items():
        assert len(answers) == 1, "one answer, before, through and after the switch"
        made_by, hits = answers[0]
        assert made_by == name and hits[0][0] == "ball-blue" and hits[0][1] == pytest.approx(1, abs=2e-3)
    assert by_bundle[names[0]][0][1] != by_bundle[names[1]][0][1], "the bundles are told apart by their scores"
    dropped = lookalike("gallery", "drop", gallery, names[1])
    assert dropped.returncode == 0 and f"Bundle {names[1]} was removed" in dropped.stdout
    assert lookalike("gallery", "verify", gallery).returncode == 0
