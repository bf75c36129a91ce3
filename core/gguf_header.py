"""The header of a GGUF file as plain Python values, read from the file's bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Pure: the
caller maps the file. The tensors' bytes are not looked at, so a vocabulary of 49k tokens takes a few hundredths of
a second.
"""

import struct
from dataclasses import dataclass
from mmap import mmap

Buffer = bytes | mmap

ALIGNMENT = 32
"""Where ``general.alignment`` does not say otherwise."""

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class MalformedGguf(ValueError):
    """Bytes that are no GGUF file, or none that this program reads."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: ``shape`` outermost dimension first, ``ggml_type`` as in ggml.h, ``start`` in bytes."""

    shape: tuple[int, ...]
    ggml_type: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``metadata`` maps to int, float, bool, str and lists of these; ``tensors`` is by GGUF name, in file order."""

    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_header(data: Buffer) -> GgufHeader:
    """Raises `MalformedGguf` when ``data`` does not begin with a whole and valid header."""
    if data[:4] != b"GGUF":
        raise MalformedGguf("not a GGUF file")
    try:
        return _Cursor(data, at=4).header()
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise MalformedGguf(f"the GGUF header is cut short or damaged ({error})") from None


class _Cursor:
    """Reads values one after the other; ``struct.error`` at the end of the data."""

    def __init__(self, data: Buffer, at: int) -> None:
        self._data = data
        self._at = at

    def header(self) -> GgufHeader:
        version = self._u32()
        if version not in (2, 3):
            raise MalformedGguf(f"GGUF version {version} is not 2 or 3 (or the file is big-endian)")
        num_tensors, num_fields = self._u64(), self._u64()
        metadata = {self._string(): self._value(self._u32()) for _ in range(num_fields)}
        infos = {self._string(): self._tensor() for _ in range(num_tensors)}
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise MalformedGguf(f"general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, {n: GgufTensor(t.shape, t.ggml_type, first + t.start) for n, t in infos.items()})

    def _tensor(self) -> GgufTensor:
        """``start`` still relative to the first tensor's byte."""
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= 4:
            raise MalformedGguf(f"a tensor has {num_dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        return GgufTensor(shape, self._u32(), self._u64())

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._u32(), self._u64())
        return self._scalars(kind, 1)[0]

    def _array(self, kind: int, length: int) -> list[object]:
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        return self._scalars(kind, length)

    def _scalars(self, kind: int, count: int) -> list[object]:
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _string(self) -> str:
        start = self._at + 8
        end = start + self._u64()
        text = self._data[start:end]
        if len(text) < end - start:
            raise struct.error("string runs past the end")
        self._at = end
        return text.decode()

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._data, self._at)[0]
        self._at += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._data, self._at)[0]
        self._at += 8
        return value
