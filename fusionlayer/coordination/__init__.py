"""Operations that ranks ask for by name, each in its own order, and that run in one order on all of them.

``Session`` is a rank's end; rank 0 has the ``Coordinator``. Where a plan says what comes next, none of it is needed.
"""

from .coordinator import Patience
from .operation import Reduce
from .session import Session

__all__ = ["Patience", "Reduce", "Session"]
