from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.data.checks import is_iterable as is_iterable
    from lockstep.data.checks import lengths as lengths
    from lockstep.data.loader import check_skip as check_skip
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "check_skip": "lockstep.data.loader",
            "is_iterable": "lockstep.data.checks",
            "lengths": "lockstep.data.checks",
        },
    )
