"""Reading of files that a user's directory names: only regular ones, as a pipe is waited for and a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file to read its bytes; what is none is not waited for.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a directory.
        ValueError: the path is none.
    """
    fd = os.open(path, _FLAGS)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, no regular file", str(path))
        return os.fdopen(fd, "rb", buffering)
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError, ValueError: as :func:`open_regular`.
    """
    with open_regular(path) as file:
        return file.read()
