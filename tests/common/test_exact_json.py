"""JSON with exact integers of any length."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.common import exact_json

LONG = st.integers(-(10**80), 10**80) | st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**4299])
VALUES = st.recursive(
    st.none() | st.booleans() | LONG | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_round_trip(value: Any) -> None:
    for text in (exact_json.dumps(value), json.dumps(value), json.dumps(value, indent=1).encode()):
        read = exact_json.loads(text)
        assert read == value
        assert repr(read) == repr(value)


def test_numbers_beyond_a_double() -> None:
    assert exact_json.loads('{"a": 1e400, "b": -1.5E+310}') == {"a": 10**400, "b": -15 * 10**309}
    assert exact_json.loads(b"[1e-400]") == [0.0]
    for text in ("1e99999", "-1e99999", "[NaN]", "[Infinity]", "{", '"\\ud800"'):
        with pytest.raises(orjson.JSONDecodeError):
            exact_json.loads(text)
    # Past what is read exactly, a number is what any other reader makes of it.
    assert exact_json.loads("[1" + "0" * 250 + ".5]") == [1e250]


def test_is_writable() -> None:
    deep: Any = 10**30
    for _ in range(200):
        deep = [deep]
    assert exact_json.is_writable(deep)
    for _ in range(100):
        deep = [deep]
    assert not exact_json.is_writable(deep)
    assert not exact_json.is_writable({"a": 10**30, "b": "\ud800"})
    assert not exact_json.is_writable({1: 10**30})
    assert exact_json.dumps({"a": 10**30, "b": "\ud800"}) == b'{"a":1' + b"0" * 30 + b',"b":"\\ud800"}'
