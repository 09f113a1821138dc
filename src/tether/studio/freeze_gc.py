"""What a server has loaded, kept out of the garbage collector's way.

A full collection looks at every object there is, and meanwhile no one is answered. Of a server's objects nearly all are
its modules, which stay as long as it runs; to look through those takes 50 to 90 ms, and that in the midst of votes.
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Collect what is left over, and take all that remains as here to stay.

    Call it again after much was loaded or let go of: what was taken as here to stay is looked at afresh.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
