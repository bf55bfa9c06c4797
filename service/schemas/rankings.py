"""The wire types of stored rankings."""

from pydantic import BaseModel, Field

from index.rankings import StoredRanking


class RankingsAnswer(BaseModel):
    """Stored rankings, or the versions of one."""

    rankings: list[StoredRanking] = Field(description="by name, or the newest version first")
