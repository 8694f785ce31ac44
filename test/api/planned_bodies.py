"""A hook of schemathesis: a sample of the bodies that it makes by plan, of which large operations have over a thousand.

Most are alike: the same wrong values for one field after the other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from schemathesis import Case, HookContext

ALL_OF_FIRST, SHARE = 100, 4  # of an operation: the first hundred bodies, then one in four

planned: Counter[str] = Counter()


@schemathesis.hook
def filter_case(context: HookContext, case: Case[Any]) -> bool:
    if case.meta is None or case.meta.phase.name.value != "coverage":
        return True
    count = planned[case.operation.label]
    planned[case.operation.label] += 1
    return count < ALL_OF_FIRST or count % SHARE == 0
