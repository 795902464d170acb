"""Token ids and log-probs as packed little-endian arrays, the form in which they travel."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidArgument

_IDS = np.dtype("<u4")
_FLOATS = np.dtype("<f4")
_MAX_ID = 2**32 - 1


def pack_ids(ids: "Sequence[int] | npt.NDArray[Any]") -> bytes:
    """Pack token ids, shape (n,), each in [0, 2**32), into 4 n bytes.

    Raises:
        InvalidArgument: an id is negative, too large or no integer, or the array has more than one axis.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise InvalidArgument(f"token ids need one axis, got shape {array.shape}", reason="BAD_PACKING")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids must be integers, got {array.dtype}", reason="BAD_PACKING")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_ID:
        raise InvalidArgument(f"token id {low if low < 0 else high} is outside 0..{_MAX_ID}", reason="BAD_PACKING")
    return array.astype(_IDS).tobytes()


def unpack_ids(packed: bytes) -> npt.NDArray[np.uint32]:
    """Unpack 4 n bytes into token ids, uint32, shape (n,). The array is read-only: it shares the bytes.

    Raises:
        InvalidArgument: the length is no multiple of 4.
    """
    return _unpack(packed, _IDS, "token ids").astype(np.uint32, copy=False)


def pack_floats(values: "Sequence[float] | npt.NDArray[Any]") -> bytes:
    """Pack numbers, shape (n,), into 4 n bytes of float32. Not-a-number and infinities keep their meaning.

    Raises:
        InvalidArgument: the array has more than one axis, or holds something that is no number.
    """
    try:
        array = np.asarray(values, dtype=_FLOATS)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"cannot pack as float32: {error}", reason="BAD_PACKING") from error
    if array.ndim != 1:
        raise InvalidArgument(f"packed numbers need one axis, got shape {array.shape}", reason="BAD_PACKING")
    return array.tobytes()


def unpack_floats(packed: bytes) -> npt.NDArray[np.float32]:
    """Unpack 4 n bytes into float32, shape (n,). The array is read-only: it shares the bytes.

    Raises:
        InvalidArgument: the length is no multiple of 4.
    """
    return _unpack(packed, _FLOATS, "float32 values").astype(np.float32, copy=False)


def _unpack(packed: bytes, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    if len(packed) % dtype.itemsize:
        raise InvalidArgument(
            f"packed {what} have {len(packed)} bytes, which is no multiple of {dtype.itemsize}", reason="BAD_PACKING"
        )
    return np.frombuffer(packed, dtype=dtype)
