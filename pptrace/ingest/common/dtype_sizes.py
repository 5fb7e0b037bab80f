"""Size of one element, bytes, by the framework's name of its dtype."""

from __future__ import annotations

_SIZES_BY_BYTES = {
    1: "byte char bool uint8 int8 qint8 quint8 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu"
    " float4_e2m1fn_x2 bits8",
    2: "short half bfloat16 int16 uint16 float16 bits16 c10::half c10::bfloat16",
    4: "int float int32 uint32 float32 qint32 complexhalf complex32",
    8: "long double int64 uint64 float64 complexfloat complex64",
    16: "complexdouble complex128",
}


DTYPE_BYTES = {name: size for size, names in _SIZES_BY_BYTES.items() for name in names.split()}
