"""Writes the C source of the extension module coxswain._native: build.py OUTPUT

CMake compiles it together with the C files of this folder (../CMakeLists.txt).
"""

import pathlib
import re
import sys

import cffi

HERE = pathlib.Path(__file__).parent


def main() -> None:
    builder = cffi.FFI()
    text = (HERE / "declarations.h").read_text()
    builder.cdef(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    builder.set_source("coxswain._native", '#include "native.h"', py_limited_api=True)
    builder.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
