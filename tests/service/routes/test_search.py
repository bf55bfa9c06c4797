"""Searches by photo and by item, and every kind of invalid request."""

import base64
import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time
from typing import Any

import httpx
import pytest
from PIL import Image

from service.auth.api_keys import KeyRing
from service.settings import Settings
from tests.service.conftest import problem, serving
from tests.support.tiny_gallery import COLOURS, tiny_photo


def test_an_unseen_view_finds_its_own_product_first(client: httpx.Client) -> None:
    for number, colour in enumerate(COLOURS):
        response = client.post("/v1/search", files={"image": tiny_photo(number, 7)})
        assert response.status_code == 200
        assert response.json()["items"][0]["id"] == f"ball-{colour}"


def test_a_match_has_everything_that_a_shop_shows(client: httpx.Client) -> None:
    answer = client.post("/v1/search", files={"image": tiny_photo(0, 1)}).json()
    best = answer["items"][0]
    assert (best["id"], best["title"], best["url"]) == ("ball-red", "A red ball", None)
    assert best["attributes"]["brand"] == "Tiny" and best["attributes"]["price"] == 4.5
    assert best["score"] == pytest.approx(1, abs=1e-3)
    picture = client.get(best["image"]["url"])
    assert Image.open(io.BytesIO(picture.content)).format == "JPEG"
    scores = [item["score"] for item in answer["items"]]
    assert scores == sorted(scores, reverse=True)
    assert len({item["id"] for item in answer["items"]}) == len(COLOURS)


def test_the_answer_names_model_and_index_and_where_the_time_went(client: httpx.Client) -> None:
    answer = client.post("/v1/search", files={"image": tiny_photo(0, 1)}).json()
    status = client.get("/v1/status").json()
    assert answer["bundle"] == status["bundle"]["id"]
    assert set(answer["milliseconds"]) == {"decode", "wait", "embed", "search"}
    assert all(value >= 0 for value in answer["milliseconds"].values())
    assert answer["milliseconds"]["embed"] > 0
    assert answer["revision"] == status["gallery"]["revision"] == status["gallery"]["index"]["revision"]
    assert "generation" not in answer


def test_a_raw_body_is_answered_as_a_form_is(client: httpx.Client) -> None:
    photo = tiny_photo(3, 2)
    raw = client.post("/v1/search", content=photo, headers={"Content-Type": "image/jpeg"})
    form = client.post("/v1/search", files={"image": photo})
    assert raw.json()["items"] == form.json()["items"]


def test_top_is_taken_from_the_address_and_from_the_form(client: httpx.Client) -> None:
    photo = tiny_photo(3, 2)
    in_address = client.post("/v1/search?limit=2", files={"image": photo}).json()
    in_form = client.post("/v1/search", files={"image": photo}, data={"limit": "3"}).json()
    assert (len(in_address["items"]), len(in_form["items"])) == (2, 3)


def test_a_turned_photo_is_set_upright_before_it_is_compared(client: httpx.Client) -> None:
    upright = Image.new("RGB", (96, 96), "blue")
    upright.paste("yellow", (0, 0, 96, 48))
    turned, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    upright.rotate(90, expand=True).save(turned, "PNG", exif=exif)
    plain = io.BytesIO()
    upright.save(plain, "PNG")
    one, other = (client.post("/v1/search", files={"image": it.getvalue()}).json() for it in (turned, plain))
    assert one["items"] == other["items"]


def test_many_searches_at_once_do_not_mix_their_answers(client: httpx.Client) -> None:
    numbers = [number % len(COLOURS) for number in range(48)]

    def best(number: int) -> str:
        response = client.post("/v1/search?limit=1", files={"image": tiny_photo(number, 4)})
        return str(response.json()["items"][0]["id"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(best, numbers)) == [f"ball-{COLOURS[number]}" for number in numbers]


def test_a_request_without_a_photo_is_refused(client: httpx.Client) -> None:
    problem(client.post("/v1/search"), 422, "image-missing")
    body = problem(client.post("/v1/search", files={"picture": tiny_photo(0, 0)}), 422, "image-missing")
    assert "`image`" in body["detail"]
    problem(client.post("/v1/search", files={"limit": (None, "3")}), 422, "image-missing")


def test_an_empty_photo_is_refused(client: httpx.Client) -> None:
    problem(client.post("/v1/search", files={"image": b""}), 422, "image-empty")
    problem(client.post("/v1/search", headers={"Content-Type": "image/png"}), 422, "image-empty")


def test_bytes_that_are_not_an_image_are_refused(client: httpx.Client) -> None:
    body = problem(client.post("/v1/search", files={"image": b"to be or not"}), 415, "image-unsupported")
    assert "JPEG" in body["remedy"]


def test_a_cut_off_jpeg_is_refused(client: httpx.Client) -> None:
    photo = tiny_photo(0, 0)
    problem(client.post("/v1/search", files={"image": photo[: len(photo) // 2]}), 422, "image-truncated")


def test_a_body_of_another_type_is_refused(client: httpx.Client) -> None:
    response = client.post("/v1/search", content="https://example.org/a.jpg", headers={"Content-Type": "text/plain"})
    assert "text/plain" in problem(response, 415, "body-unsupported")["detail"]


def test_a_form_that_cannot_be_parsed_is_refused(client: httpx.Client) -> None:
    headers = {"Content-Type": "multipart/form-data"}
    problem(client.post("/v1/search", content=b"no boundary", headers=headers), 400, "request-malformed")
    many = [("image", (f"{number}.jpg", tiny_photo(0, 0))) for number in range(17)]
    assert "fewer files" in problem(client.post("/v1/search", files=many), 400, "request-malformed")["remedy"]
    fields = {str(number): (None, "1") for number in range(21)}
    assert "fewer fields" in problem(client.post("/v1/search", files=fields), 400, "request-malformed")["remedy"]


def test_a_photo_in_a_text_field_gets_a_remedy(settings: Settings) -> None:
    with serving(settings.model_copy(update={"max_body_bytes": 3_000_000})) as client:
        body = problem(client.post("/v1/search", files={"image": (None, bytes(1_100_000))}), 400, "request-malformed")
        assert "as a file" in body["remedy"]


def test_a_body_that_declares_too_many_bytes_is_refused_in_both_shapes(client: httpx.Client) -> None:
    large = bytes(300_001)
    body = problem(client.post("/v1/search", files={"image": large}), 413, "body-too-large")
    assert "300,000" in body["detail"]
    headers = {"Content-Type": "image/jpeg"}
    problem(client.post("/v1/search", content=large, headers=headers), 413, "body-too-large")


def test_a_stream_without_a_declared_size_is_stopped_at_the_limit(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (bytes(10_000) for _ in range(31))

    headers = {"Content-Type": "image/jpeg"}
    problem(client.post("/v1/search", content=chunks(), headers=headers), 413, "body-too-large")
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'

    def form() -> Iterator[bytes]:
        yield head
        yield from chunks()

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    problem(client.post("/v1/search", content=form(), headers=headers), 413, "body-too-large")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/search", "image/jpeg"), ("/v1/search/batch", "application/json"), ("/v1/jobs", "application/json")],
)
def test_a_client_that_leaves_midway_is_noted_and_does_no_harm(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str, kind: str
) -> None:
    caplog.set_level("INFO", "service.middleware")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 90000\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(head.encode() + bytes(1000))
    for _ in range(100):
        assert client.post("/v1/search", files={"image": tiny_photo(0, 0)}).status_code == 200
        if caplog.messages:
            break
    assert caplog.messages and "the client left" in caplog.messages[0]


def test_too_many_pixels_are_refused_however_few_bytes_hold_them(client: httpx.Client) -> None:
    out = io.BytesIO()
    Image.new("L", (1001, 1000)).save(out, "PNG")
    body = problem(client.post("/v1/search", files={"image": out.getvalue()}), 413, "image-too-many-pixels")
    assert "1001 x 1000" in body["detail"] and "1,000,000" in body["detail"]


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many", "1.5"])
def test_a_limit_out_of_range_is_named_with_its_value(client: httpx.Client, limit: str) -> None:
    photo = {"image": tiny_photo(0, 0)}
    for response in (
        client.post("/v1/search", params={"limit": limit}, files=photo),
        client.post("/v1/search", data={"limit": limit}, files=photo),
    ):
        body = problem(response, 422, "request-invalid")
        assert body["detail"].startswith("limit must be ") and f"(got {limit!r})" in body["detail"]


def test_a_search_takes_its_options_in_every_form(client: httpx.Client) -> None:
    photo = tiny_photo(3, 2)
    encoded = base64.b64encode(photo).decode()
    wanted = {"colour": ["red", "yellow", "green"], "price": {"gte": 5}}
    as_json = client.post("/v1/search", json={"image": encoded, "filter": wanted, "limit": 2}).json()
    in_form = client.post("/v1/search", files={"image": photo}, data={"filter": json.dumps(wanted), "limit": 2}).json()
    in_address = client.post(
        "/v1/search",
        params={"filter": json.dumps(wanted), "limit": 2},
        content=photo,
        headers={"Content-Type": "image/jpeg"},
    ).json()
    assert as_json["items"] == in_form["items"] == in_address["items"]
    assert {item["id"] for item in as_json["items"]} == {"ball-yellow", "ball-green"}


def test_more_like_an_item_leaves_it_out(client: httpx.Client) -> None:
    answer = client.post("/v1/search", json={"item_id": "ball-red", "limit": 3}).json()
    assert len(answer["items"]) == 3 and "ball-red" not in {item["id"] for item in answer["items"]}
    problem(client.post("/v1/search", json={"item_id": "no such"}), 404, "item-missing")


def test_a_cursor_continues_after_the_page(client: httpx.Client) -> None:
    photo = {"image": tiny_photo(0, 0)}
    whole = client.post("/v1/search?limit=8", files=photo).json()
    first = client.post("/v1/search?limit=5", files=photo).json()
    rest = client.post("/v1/search", params={"limit": 5, "cursor": first["cursor"]}, files=photo).json()
    assert first["items"] + rest["items"] == whole["items"] and rest["cursor"] is None
    problem(client.post("/v1/search?cursor=nonsense", files=photo), 422, "search-invalid")


def test_a_box_searches_for_a_part(client: httpx.Client) -> None:
    sheet = Image.new("RGB", (192, 96))
    sheet.paste(Image.open(io.BytesIO(tiny_photo(2, 0))), (0, 0))
    sheet.paste(Image.open(io.BytesIO(tiny_photo(3, 0))), (96, 0))
    out = io.BytesIO()
    sheet.save(out, "PNG")
    for box, colour in (("0,0,0.5,1", "blue"), ("0.5,0,1,1", "yellow")):
        answer = client.post("/v1/search", params={"box": box, "limit": 1}, files={"image": out.getvalue()}).json()
        assert answer["items"][0]["id"] == f"ball-{colour}"
    problem(client.post("/v1/search?box=0.5,0,0.4,1", files={"image": out.getvalue()}), 422, "request-invalid")


def test_vectors_are_returned_only_on_request(client: httpx.Client) -> None:
    photo = {"image": tiny_photo(0, 0)}
    plain = client.post("/v1/search?limit=1", files=photo).json()["items"][0]
    full = client.post("/v1/search?limit=1&include=vectors", files=photo).json()["items"][0]
    assert plain["vector"] is None and plain["attributes"]
    assert len(full["vector"]) == 48 and full["attributes"] == {}


def test_an_option_in_the_body_counts_unless_the_query_string_has_it(client: httpx.Client) -> None:
    body = {"item_id": "ball-red", "limit": 3}
    assert len(client.post("/v1/search", json=body).json()["items"]) == 3
    assert len(client.post("/v1/search?limit=2", json=body).json()["items"]) == 2


def test_a_photo_may_be_sent_as_bytes_of_no_known_type(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    answer = client.post("/v1/search?limit=1", content=tiny_photo(2, 5), headers=headers).json()
    assert answer["items"][0]["id"] == "ball-blue"


@pytest.mark.parametrize(
    ("filter", "hint"),
    [
        ({"color": "red"}, "No searchable item has the attribute 'color'"),
        ({"price": {"gte": "4"}}, "compares 'price' with texts, but its values are numbers."),
        ({"colour": [1, True]}, "compares 'colour' with true or false or numbers, but its values are texts."),
    ],
)
def test_a_filter_that_cannot_match_is_explained(client: httpx.Client, filter: dict[str, Any], hint: str) -> None:
    answer = client.post("/v1/search", json={"item_id": "ball-red", "filter": filter}).json()
    assert answer["items"] == [] and len(answer["hints"]) == 1 and hint in answer["hints"][0]


@pytest.mark.parametrize("filter", [{}, {"colour": "red"}, {"colour": "no such"}, {"color": {"exists": False}}])
def test_other_searches_have_no_hints(client: httpx.Client, filter: dict[str, Any]) -> None:
    assert client.post("/v1/search", json={"item_id": "ball-blue", "filter": filter}).json()["hints"] == []


def test_a_batch_is_answered_in_its_order(client: httpx.Client) -> None:
    searches = [{"image": base64.b64encode(tiny_photo(number, 3)).decode(), "limit": 1} for number in (4, 1)]
    answers = client.post(
        "/v1/search/batch", json={"searches": [*searches, {"item_id": "ball-red", "limit": 1}]}
    ).json()
    assert [answer["items"][0]["id"] for answer in answers["answers"]][:2] == ["ball-magenta", "ball-green"]
    problem(client.post("/v1/search/batch", json={"searches": searches * 9}), 422, "request-invalid")


def test_an_option_outside_the_searches_of_a_batch_is_refused(client: httpx.Client) -> None:
    batch = {"searches": [{"item_id": "ball-red"}], "limit": 1}
    assert "limit is unknown" in problem(client.post("/v1/search/batch", json=batch), 422, "request-invalid")["detail"]


@pytest.mark.parametrize("path", ["/v1/search/batch", "/v1/jobs"])
def test_a_body_is_not_parsed_without_a_key(settings: Settings, tmp_path: Path, path: str) -> None:
    key = {"X-API-Key": KeyRing(tmp_path / "keys.json").create("shop", ["admin"])}
    with serving(settings.model_copy(update={"keys": tmp_path / "keys.json"})) as client:
        broken: dict[str, Any] = {"content": "{", "headers": {"Content-Type": "application/json"}}
        problem(client.post(path, **broken), 401, "key-missing")
        broken["headers"] |= key
        assert "JSON" in problem(client.post(path, **broken), 422, "request-invalid")["detail"]
        # Any web page may have a browser send a text here; JSON only those that the service allows.
        refused = problem(
            client.post(path, content="{}", headers={**key, "Content-Type": "text/plain"}), 422, "request-invalid"
        )
        assert "text/plain" in refused["detail"] and "application/json" in refused["remedy"]


MANY = {str(number): number for number in range(1000)}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/search/batch", {"searches": [{}] * 5000}, "searches must have at most 256 entries (got 5,000)"),
        ("/v1/search/batch", {"searches": [{}] * 256}, "searches[0]: "),
        ("/v1/search/batch", {"searches": [{}] * 256}, "And 246 more."),
        (
            "/v1/search/batch",
            {"searches": [{"item_id": "a"}, {"item_id": "a", "limit": 0}]},
            "searches[1].limit must be at least 1 (got 0).",
        ),
        ("/v1/search/batch", {"searches": [{"item_id": "a", "exclude": [1] * 1000}] * 16}, "And 6 more."),
        ("/v1/search", MANY, "1,000 keys were sent"),
        ("/v1/search", {"item_id": "a", "include": ["x"] * 1000}, "include must have at most 8 entries (got 1,000)"),
        ("/v1/search", {"item_id": "a", "exclude": [1] * 1000}, "exclude[0] must be a text (got 1)."),
        ("/v1/search", {"item_id": "a", "filter": [{}] * 1000}, "filter must be an object (got a list)."),
        ("/v1/jobs", {"source": "catalogue", **MANY}, "1,001 keys"),
    ],
)
def test_many_mistakes_are_reported_briefly(client: httpx.Client, path: str, body: object, message: str) -> None:
    response = client.post(path, json=body)
    assert message in problem(response, 422, "request-invalid")["detail"]
    assert len(response.content) < 2500


def test_half_a_character_is_a_mistake_of_the_request(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    search = r'{"item_id": "ball-red", "filter": {"a": {"\ud800": 1}}}'
    problem(client.post("/v1/search", content=search, headers=headers), 422, "request-invalid")
    batch = f'{{"searches": [{search}]}}'
    problem(client.post("/v1/search/batch", content=batch, headers=headers), 422, "request-invalid")


def test_addresses_are_off_unless_hosts_are_allowed(client: httpx.Client) -> None:
    problem(client.post("/v1/search", json={"image_url": "https://example.com/a.jpg"}), 422, "url-disabled")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({}, "request-invalid"),
        ({"item_id": "a", "image": "aGk="}, "request-invalid"),
        ({"image": "!"}, "request-invalid"),
        ({"item_id": "ball-red", "filter": {"price": {"under": 5}}}, "filter-invalid"),
        ({"item_id": "ball-red", "min_score": 2}, "request-invalid"),
        ({"item_id": "ball-red", "nonsense": 1}, "request-invalid"),
    ],
)
def test_an_invalid_search_is_refused(client: httpx.Client, body: dict[str, object], kind: str) -> None:
    problem(client.post("/v1/search", json=body), 422, kind)


def test_photo_that_needs_more_memory_than_there_is_gets_413(settings: Settings) -> None:
    out = io.BytesIO()
    Image.new("RGB", (900, 900)).save(out, "WEBP")
    with serving(settings.model_copy(update={"max_decode_bytes": 10_000_000})) as client:
        body = problem(client.post("/v1/search", files={"image": out.getvalue()}), 413, "image-too-many-pixels")
        assert "bytes of memory; the limit is 10,000,000" in body["detail"]
        body = problem(
            client.put("/v1/items/huge", data={"item": "{}"}, files={"image": out.getvalue()}),
            413,
            "image-too-many-pixels",
        )
        assert client.post("/v1/search", files={"image": tiny_photo(0, 1)}).status_code == 200


def test_progressive_jpeg_with_many_scans_is_refused_quickly(settings: Settings) -> None:
    out = io.BytesIO()
    Image.new("RGB", (7000, 7000)).save(out, "JPEG", progressive=True, quality=30)
    data = out.getvalue()
    data = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 80 + data[-2:]
    with serving(settings.model_copy(update={"max_pixels": 50_000_000, "max_body_bytes": 2_000_000})) as client:
        used = process_time()
        body = problem(client.post("/v1/search", files={"image": data}), 422, "image-unreadable")
        assert process_time() - used < 0.5  # of the CPU: other work on the machine does not count
    assert body["detail"] == "The image has 90 scans; the limit at 7000 x 7000 pixels is 10."


def test_photo_in_an_unsupported_format_is_named(client: httpx.Client) -> None:
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
    answer = client.post("/v1/search", content=heic, headers={"Content-Type": "image/heic"})
    assert answer.status_code in (415, 422) and "HEI" in answer.json()["detail"]
    answer = client.post("/v1/search", content=b"\xff\x0a" + bytes(40), headers={"Content-Type": "image/jxl"})
    assert problem(answer, 415, "image-unsupported")["detail"] == "This is a JPEG XL file, which is not supported."
    text = problem(client.post("/v1/search", files={"image": b"hello"}), 415, "image-unsupported")
    assert (text["title"], text["detail"]) == (
        "Unsupported photo format",
        "This file is not a photo of a known format.",
    )
    assert text["remedy"] == "Send a complete JPEG, PNG, WebP, AVIF, HEIC, TIFF, GIF or BMP file."


def test_tiff_finds_its_photo(client: httpx.Client) -> None:
    photo = io.BytesIO()
    Image.open(io.BytesIO(tiny_photo(0, 7))).save(photo, "TIFF", compression="tiff_lzw")
    answer = client.post("/v1/search", content=photo.getvalue(), headers={"Content-Type": "image/tiff"})
    assert answer.json()["items"][0]["id"] == f"ball-{COLOURS[0]}"


# Examples and rankings


def encode(photo: bytes) -> str:
    return base64.b64encode(photo).decode()


def found(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [item["id"] for item in response.json()["items"]]


def test_several_photos_of_a_form_are_combined(client: httpx.Client) -> None:
    photos = [tiny_photo(0, 3), tiny_photo(2, 3)]
    files = [("image", (f"{number}.jpg", photo)) for number, photo in enumerate(photos)]
    by_form = client.post("/v1/search?limit=3", files=files).json()
    examples = [{"image": encode(photo)} for photo in photos]
    by_json = client.post("/v1/search", json={"examples": examples, "limit": 3}).json()
    assert by_form["items"] == by_json["items"]
    best = found(client.post("/v1/search", files=files, data={"combine": "best"}))
    assert {*best[:2]} == {f"ball-{COLOURS[0]}", f"ball-{COLOURS[2]}"}
    assert by_form["milliseconds"]["embed"] > 0
    body = problem(client.post("/v1/search", files=files, data={"box": "0,0,1,0.5"}), 422, "request-invalid")
    assert "box" in body["detail"]


@pytest.mark.parametrize("combine", ["mean", "best"])
def test_items_that_are_examples_are_left_out(client: httpx.Client, combine: str) -> None:
    red, blue, green = f"ball-{COLOURS[0]}", f"ball-{COLOURS[1]}", f"ball-{COLOURS[2]}"
    examples = [{"item_id": red}, {"image": encode(tiny_photo(3, 2)), "box": [0.1, 0, 1, 1], "weight": 0.5},
                {"item_id": blue, "weight": -0.5}]  # fmt: skip
    response = client.post("/v1/search", json={"examples": examples, "combine": combine, "explain": True})
    assert not {red, blue} & {*found(response)} and green in found(response)
    window = response.json()["window"]
    assert (window is None) == (combine == "mean")
    for item in response.json()["items"]:
        rules = [share["rule"] for share in item["explanation"]["shares"]]
        assert rules == (["negative examples"] if combine == "best" else [])


def test_an_example_alone_is_searched_as_it_is(client: httpx.Client) -> None:
    photo, item_id = encode(tiny_photo(4, 1)), f"ball-{COLOURS[4]}"
    for query in ({"image": photo, "box": [0, 0, 0.9, 0.9]}, {"item_id": item_id}):
        as_example = client.post("/v1/search", json={"examples": [query]}).json()
        assert as_example["items"] == client.post("/v1/search", json=query).json()["items"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"examples": []}, "examples must have at least 1"),
        ({"examples": [{"item_id": "a"}] * 17}, "examples must have at most 16"),
        ({"examples": [{"item_id": "a", "image": "b"}]}, "examples[0]"),
        ({"examples": [{"item_id": "a", "box": [0, 0, 1, 1]}]}, "allowed with a photo only"),
        ({"examples": [{"item_id": "a", "weight": 0}]}, "weight"),
        ({"examples": [{"item_id": "a", "weight": -2}]}, "examples[0].weight must be at least -1"),
        ({"examples": [{"item_id": "a", "weight": -1}]}, "positive weight"),
        ({"examples": [{"item_id": "a"}], "item_id": "a"}, "exactly one"),
        ({"examples": [{"item_id": "a"}], "box": [0, 0, 1, 1]}, "box"),
        ({"item_id": "a", "combine": "sum"}, "combine"),
        ({"item_id": "a", "ranking": 5}, "ranking: must be the name of a stored ranking"),
        ({"item_id": "a", "ranking": {"diversity": 2}}, "ranking.diversity must be at most 1"),
        ({"item_id": "a", "ranking": {"diverse": 2}}, "ranking.diverse is unknown (did you mean diversity?)"),
        ({"item_id": "a", "ranking": {"boosts": [{"weight": 0.5}]}}, "ranking.boosts[0]"),
        ({"item_id": "a", "ranking": {str(number): 1 for number in range(40)}}, "40 keys"),
    ],
)
def test_invalid_examples_and_rankings_are_named(client: httpx.Client, body: dict[str, Any], detail: str) -> None:
    assert detail in problem(client.post("/v1/search", json=body), 422, "request-invalid")["detail"]


def test_problems_of_examples_and_rankings_are_named(client: httpx.Client) -> None:
    red = f"ball-{COLOURS[0]}"
    cancelling = {"examples": [{"item_id": red}, {"item_id": red, "weight": -1}]}
    assert "cancel" in problem(client.post("/v1/search", json=cancelling), 422, "search-invalid")["detail"]
    unknown = {"examples": [{"item_id": red}, {"item_id": "nobody"}]}
    problem(client.post("/v1/search", json=unknown), 404, "item-missing")
    broken = {"examples": [{"item_id": red}, {"image": encode(b"no photo")}, {"image": encode(tiny_photo(1, 1))}]}
    problem(client.post("/v1/search", json=broken), 415, "image-unsupported")
    filter = {"item_id": red, "ranking": {"boosts": [{"filter": {"price": {"over": 1}}, "weight": 0.1}]}}
    body = problem(client.post("/v1/search", json=filter), 422, "filter-invalid")
    assert "ranking.boosts[0].filter" in body["detail"]
    body = problem(client.post("/v1/search?ranking={no", files={"image": tiny_photo(0, 1)}), 422, "request-invalid")
    assert "ranking" in body["detail"]


def test_a_ranking_orders_the_items_and_explains_why(client: httpx.Client) -> None:
    last = found(client.post("/v1/search", files={"image": tiny_photo(0, 1)}))[-1]
    ranking = {"pin": [last], "hide": {"ids": [f"ball-{COLOURS[1]}"]}, "boosts": [
        {"attribute": "price", "from": 0, "to": 100, "weight": 0.5}], "diversity": 0.1}  # fmt: skip
    body = {"image": encode(tiny_photo(0, 1)), "ranking": ranking, "explain": True}
    by_json = client.post("/v1/search", json=body)
    by_form = client.post(
        "/v1/search", files={"image": tiny_photo(0, 1)}, data={"ranking": json.dumps(ranking), "explain": "true"}
    )
    by_query = client.post(
        "/v1/search", params={"ranking": json.dumps(ranking), "explain": "true"}, files={"image": tiny_photo(0, 1)}
    )
    assert by_json.json()["items"] == by_form.json()["items"] == by_query.json()["items"]
    assert found(by_json)[0] == last and f"ball-{COLOURS[1]}" not in found(by_json)
    for item in by_json.json()["items"]:
        told = item["explanation"]
        assert told["similarity"] == item["score"]
        assert told["score"] == pytest.approx(told["similarity"] + sum(share["share"] for share in told["shares"]))
    assert by_json.json()["items"][0]["explanation"]["reason"] == "pinned"
    assert by_json.json()["window"] == {"size": 48, "candidates": len(COLOURS) - 2, "exhausted": True}


def test_the_pages_of_a_ranked_search_return_every_item_once(client: httpx.Client) -> None:
    for ranking in ({"diversity": 0.4, "window": 10}, {"group_by": "brand"}, {"sort_by": {"attribute": "price"}}):
        body: dict[str, Any] = {"image": encode(tiny_photo(0, 1)), "ranking": ranking, "limit": 3}
        complete = found(client.post("/v1/search", json={**body, "limit": 100}))
        pages: list[str] = []
        while True:
            answer = client.post("/v1/search", json=body).json()
            pages += [item["id"] for item in answer["items"]]
            if answer["cursor"] is None:
                break
            body["cursor"] = answer["cursor"]
        assert pages == complete
    changed = (
        problem(client.post("/v1/search", json={**body, "ranking": {"group_by": "brand"}}), 422, "search-invalid")
        if "cursor" in body
        else None
    )
    assert changed and "ranking has changed" in changed["detail"]


def test_a_batch_takes_examples_and_rankings(client: httpx.Client) -> None:
    examples = [{"item_id": f"ball-{COLOURS[0]}"}, {"image": encode(tiny_photo(2, 3))}]
    searches = [{"examples": examples, "limit": 3}, {"item_id": f"ball-{COLOURS[0]}", "ranking": {"group_by": "brand"}}]
    answers = client.post("/v1/search/batch", json={"searches": searches}).json()["answers"]
    for search, answer in zip(searches, answers, strict=True):
        assert answer["items"] == client.post("/v1/search", json=search).json()["items"]
    many = [{"examples": [{"item_id": "a"}] * 16}] * 5
    body = problem(client.post("/v1/search/batch", json={"searches": many}), 422, "request-invalid")
    assert "80 photos and items" in body["detail"]
