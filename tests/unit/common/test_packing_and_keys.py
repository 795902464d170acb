import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import keys
from services.common.errors import InvalidArgument
from services.common.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from services.common.telemetry import stream_label


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_come_back_to_the_id(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed).tolist() == ids
    assert pack_ids(np.array(ids, dtype=np.int64)) == packed


@given(st.lists(st.floats(width=32)))
def test_numbers_come_back_to_the_bit(values: list[float]) -> None:
    back = unpack_floats(pack_floats(values))
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, np.array(values, dtype=np.float32))


def test_the_order_of_bytes_is_little_endian() -> None:
    assert pack_ids([1, 256]) == bytes([1, 0, 0, 0, 0, 1, 0, 0])
    assert pack_floats([1.0]) == bytes([0, 0, 128, 63])


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], [[1, 2]], ["a"]])
def test_what_is_no_token_id_is_refused(bad: list[object]) -> None:
    with pytest.raises(InvalidArgument, match="token id"):
        pack_ids(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_floats])
def test_a_cut_off_array_is_refused_with_its_length(unpack: object) -> None:
    with pytest.raises(InvalidArgument, match="have 7 bytes"):
        unpack(b"1234567")  # type: ignore[operator]


def test_no_two_keys_of_a_job_are_one() -> None:
    job_keys = [
        function("j1")
        for name, function in vars(keys).items()
        if inspect.isfunction(function)
        and list(inspect.signature(function).parameters) == ["job_id"]
        and name != "job_prefix"
    ]
    assert len(job_keys) >= 8
    assert len(set(job_keys)) == len(job_keys)
    assert all(key.startswith(keys.job_prefix("j1")) for key in job_keys)


@pytest.mark.parametrize("bad", ["", "a:b", "a*", "a b", "a{b}"])
def test_a_job_id_cannot_reach_into_another_jobs_keys(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="job id"):
        keys.job(bad)


def test_a_prompt_and_its_group_with_one_id_are_seen_apart() -> None:
    assert keys.seen(keys.prompts(), "j/0/1/p/0/train") != keys.seen(keys.groups("j"), "j/0/1/p/0/train")


def test_stream_labels_hold_no_job_id() -> None:
    assert stream_label(keys.groups("job-1")) == stream_label(keys.groups("job-2")) == "job:groups"
    assert stream_label(keys.prompts()) == "prompts"
