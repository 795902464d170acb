import pickle

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import errors
from services.common.errors import DETAILS_KEY, RollwiseError, from_status, to_status

CLASSES = [
    errors.InvalidArgument,
    errors.NotFound,
    errors.FailedPrecondition,
    errors.ResourceExhausted,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.Unauthenticated,
    errors.AlreadyExists,
    errors.Internal,
]
STDLIB = {
    errors.InvalidArgument: ValueError,
    errors.NotFound: LookupError,
    errors.Unavailable: ConnectionError,
    errors.DeadlineExceeded: TimeoutError,
    errors.Unauthenticated: PermissionError,
    errors.AlreadyExists: ValueError,
}


@pytest.mark.parametrize("cls", CLASSES)
@given(message=st.text(min_size=1, max_size=50), metadata=st.dictionaries(st.sampled_from("abc"), st.text(max_size=20)))
def test_an_error_crosses_the_wire_whole(cls: type[RollwiseError], message: str, metadata: dict[str, str]) -> None:
    status = to_status(cls(message, reason="A_REASON", **metadata))
    back = from_status(cls.code, status.message, [(DETAILS_KEY, status.SerializeToString())])
    assert type(back) is cls
    assert (str(back), back.reason, back.metadata) == (message, "A_REASON", metadata)


@pytest.mark.parametrize(("cls", "base"), STDLIB.items())
def test_each_error_is_the_standard_one_too(cls: type[RollwiseError], base: type[Exception]) -> None:
    with pytest.raises(base, match="gone"):
        raise cls("gone")


def test_an_error_survives_pickling_with_its_metadata() -> None:
    back = pickle.loads(pickle.dumps(errors.NotFound("no row", reason="NO_ROW", row="3")))
    assert (type(back), str(back), back.reason, back.metadata) == (errors.NotFound, "no row", "NO_ROW", {"row": "3"})


def test_a_long_message_is_cut_before_headers_burst() -> None:
    status = to_status(errors.Internal("x" * 100_000))
    assert len(status.message) == errors.MAX_MESSAGE_CHARS


def test_an_error_nobody_worded_names_the_peer_and_keeps_its_code_as_reason() -> None:
    back = from_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", None, where="127.0.0.1:7101")
    assert isinstance(back, errors.FailedPrecondition)
    assert back.reason == "UNIMPLEMENTED"
    assert "127.0.0.1:7101" in str(back)
