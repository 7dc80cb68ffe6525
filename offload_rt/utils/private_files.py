"""Create files and folders that only their owner can access, independently of the umask.

These functions create all files that contain text, tokens, KV or keys.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def make_private_folder(path: Path) -> bool:
    """Create a folder and any missing parents with mode 0700. Return False if the folder already exists.

    Raises OSError if the folder cannot be created, or if `path` exists but is not a folder.
    """
    if not path.parent.exists():
        make_private_folder(path.parent)
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    path.chmod(FOLDER_MODE)  # The umask may have removed permissions that the owner needs.
    return True


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. New files get mode 0600. Symbolic links are not followed."""
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) != FILE_MODE:
            os.fchmod(handle, FILE_MODE)
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_private(path: Path) -> None:
    """Remove other users' access to a file or folder. Symbolic links are skipped. Raises OSError."""
    status = path.lstat()
    mode = FOLDER_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE
    known = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    # The mode is changed only if it is wrong, so that files on a read-only file system raise no error.
    if known and stat.S_IMODE(status.st_mode) != mode:
        path.chmod(mode)
