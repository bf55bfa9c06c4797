"""What the model gets wrong, shown as photos."""

import os
from collections.abc import Sequence
from html import escape

from index.embedding.images import thumbnail
from training.data.dataset import Photo, counted
from training.data.torch_datasets import read_photo
from training.report.analysis import Study
from training.report.charts import data_uri
from training.report.neighbors import Confusion, Neighbour, WrongAnswer

_ROWS, _NEIGHBOURS, _PAIRS = 24, 6, 12
_SIDE = 128


class Thumbnails:
    """Small pictures, each kept once in the page however often it is shown."""

    def __init__(self, photos: Sequence[Photo]) -> None:
        self._photos = photos
        self._root = os.path.commonpath([photo.path.absolute().parent for photo in photos])
        self._used: dict[int, None] = {}

    def path(self, place: int) -> str:
        """Where the photo lies, below what all photos share."""
        return os.path.relpath(self._photos[place].path.absolute(), self._root)

    def tile(self, place: int, kind: str, role: str, score: float | None = None) -> str:
        """A photo, what it is here, and whether it is right: told by colour, sign, border and words."""
        self._used[place] = None
        label = escape(self._photos[place].label)
        sign = {"right": "✓ ", "wrong": "✕ "}.get(kind, "")
        number = f"<b>{sign}{score:.3f}</b>" if score is not None else ""
        verdict = f", {kind}, cosine {score:.3f}" if score is not None else ""
        return (
            f'<figure class="tile {kind}"><p class="kind">{role}</p>'
            f'<svg viewBox="0 0 {_SIDE} {_SIDE}" role="img" aria-label="{role}: {label}{verdict}">'
            f'<use href="#p{place}"/></svg>'
            f'<figcaption>{number}<span class="class" title="{label}">{label}</span></figcaption></figure>'
        )

    def store(self) -> str:
        """The pictures themselves, out of sight."""
        symbols = []
        for place in self._used:
            picture = data_uri(thumbnail(read_photo(self._photos[place], _SIDE), _SIDE), "jpeg")
            symbols.append(
                f'<symbol id="p{place}" viewBox="0 0 {_SIDE} {_SIDE}">'
                f'<image width="{_SIDE}" height="{_SIDE}" href="{picture}"/></symbol>'
            )
        return f'<svg class="store" aria-hidden="true">{"".join(symbols)}</svg>'


def worst_queries(study: Study, thumbnails: Thumbnails) -> str:
    """The queries that prefer a wrong photo most, with their neighbours."""
    wrong, total = int(study.answers.wrong.sum()), len(study.answers.queries)
    rows = study.answers.worst(_ROWS, _NEIGHBOURS)
    if not rows:
        return f'<h2>Worst queries</h2><p class="words">All {total:,} queries find a photo of their class first.</p>'
    shown = "" if len(rows) == wrong else f" These are the {len(rows)} worst."
    return f"""<h2>Worst queries</h2>
<p class="words">{wrong:,} of {total:,} queries find a photo of another class first.{shown} They are ranked by how much
nearer that photo is than any right one: a label that is wrong, or two classes that are one, shows at the top.</p>
<ol class="rows">{"".join(_row(study.test, row, thumbnails) for row in rows)}</ol>"""


def _row(photos: Sequence[Photo], row: WrongAnswer, thumbnails: Thumbnails) -> str:
    own = photos[row.query].label

    def tile(neighbour: Neighbour, role: str) -> str:
        kind = "right" if photos[neighbour.photo].label == own else "wrong"
        return thumbnails.tile(neighbour.photo, kind, role, neighbour.score)

    found = "".join(tile(neighbour, f"No. {place}") for place, neighbour in enumerate(row.neighbours, start=1))
    nearest = photos[row.neighbours[0].photo].label
    return (
        f'<li class="row card"><p class="says"><strong>{escape(thumbnails.path(row.query))}</strong> '
        f'<span class="quiet">is labelled {escape(own)}; the nearest is {escape(nearest)}, '
        f"{row.margin:.3f} nearer than any of its class</span></p>"
        f'{thumbnails.tile(row.query, "query", "Query")}<div class="found">{found}</div>'
        f"{tile(row.right, f'Best right: no. {row.rank}')}</li>"
    )


def confused_classes(study: Study, thumbnails: Thumbnails) -> str:
    """The pairs of classes that are taken for each other most often; nothing where none is."""
    pairs = study.answers.confusions(_PAIRS)
    if not pairs:
        return ""
    listed = "".join(_pair(study.test, pair, thumbnails) for pair in pairs)
    return f"""<h2>Classes taken for each other</h2>
<p class="words">Pairs of classes by the number of queries of either that find the other first, with the surest mistake
of each.</p><ul class="pairs">{listed}</ul>"""


def _pair(photos: Sequence[Photo], pair: Confusion, thumbnails: Thumbnails) -> str:
    one, other = map(escape, pair.classes)
    times = counted(pair.mistakes, "query", "queries")
    return (
        f'<li class="pair card"><p><strong>{times}</strong> <span class="quiet">{one} and {other}</span></p>'
        + thumbnails.tile(pair.query, "query", "Query")
        + thumbnails.tile(pair.found.photo, "wrong", "Found first", pair.found.score)
        + "</li>"
    )
