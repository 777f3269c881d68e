"""Mutated request bodies: values of any shape put anywhere into a JSON body."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

DEEP: Any = None
"""Nested deeper than any reader accepts."""
for _ in range(150):
    DEEP = {"a": DEEP}


def json_values(*special: Any) -> st.SearchStrategy[Any]:
    """JSON values of any shape, and often one of `special` or of the values that readers commonly get wrong."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.one_of(
        st.sampled_from([0, 1, 1.0, True, False, "", [], {}, 2**70, -(2**63), 10**400, DEEP, [DEEP], *special]),
        st.recursive(
            scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
    )


def slots(value: Any, levels: int = 12) -> list[tuple[Any, Any]]:
    """The slots of a JSON value, as a container and a key. Deep values are not made deeper."""
    if not levels or not isinstance(value, dict | list):
        return []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [slot for key, inner in pairs for slot in [(value, key), *slots(inner, levels - 1)]]


@st.composite
def mutants(draw: st.DrawFn, base: dict[str, Any], values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """`base` with one to three values replaced, deleted, repeated or swapped."""
    body = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3)) if slots(body) else 0):
        container, key = draw(st.sampled_from(slots(body)))
        action = draw(st.sampled_from(["replace", "delete", "repeat", "swap"]))
        if action == "replace":
            # Shared values would be nested into each other by the next mutation.
            container[key] = copy.deepcopy(draw(values))
        elif action == "delete":
            del container[key]
        elif action == "repeat" and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif isinstance(container, list):
            other = draw(st.integers(0, len(container) - 1))
            container[key], container[other] = container[other], container[key]
        if not slots(body):
            break
    return body
