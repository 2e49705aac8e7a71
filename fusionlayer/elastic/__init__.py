"""The members of an elastic job, which leave and join; the rest forms the job's next generation.

``generation`` is data: a list of members. ``member_store`` is the store that each member keeps for the others.
``forming`` is the protocol by which the remaining members agree on the next generation. ``members`` is this process's
part in the job.
"""

from .generation import Generation, Member, MemberReport
from .members import Members

__all__ = ["Generation", "Member", "Members", "MemberReport"]
