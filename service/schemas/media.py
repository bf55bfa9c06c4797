"""The wire types of pictures."""

from pydantic import BaseModel


class Example(BaseModel):
    """A sample photo to search with."""

    name: str
    url: str


class Examples(BaseModel):
    """The sample photos that the operator provides."""

    examples: list[Example]
