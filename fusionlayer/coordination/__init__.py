"""Operations that ranks request by name: each rank in its own order, while they run in the same order on all ranks.

``Session`` is a rank's end; rank 0 has the ``Coordinator``. Training by a plan needs neither, since the plan fixes the
order.
"""

from .coordinator import Patience
from .operation import Reduce
from .session import Session

__all__ = ["Patience", "Reduce", "Session"]
