"""Addresses of storage, such as ``s3://bucket/prefix``, in specs and on the command line."""

import re

from mtrain.errors import UsageError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/]*:[^/]*@|://[^@]*:[^@]*@")


def is_address(text: str) -> bool:
    """Return whether ``text`` is an address with a scheme, rather than a path on this host."""
    # fsspec chains addresses with ``::``, as in ``zip://a.zip::s3://bucket``.
    return _SCHEME.match(text) is not None or "::" in text


def mask(text: str) -> str:
    """Return an address without what stands before ``@``, which may be a password."""
    # Up to the last @: a password may hold one.
    return re.sub(r"://.*@", "://***@", text, flags=re.DOTALL)


def checked_address(text: str) -> str:
    """Return ``text`` without slashes at its end.

    Raises:
        UsageError: it is no address, or one that holds a password. The message does not repeat the password.
    """
    if _PASSWORD.search(text):
        raise UsageError(
            f"an address with a password, {mask(text)}; expected one without: give credentials in the environment or in "
            "the file that the storage's library reads (AWS_ACCESS_KEY_ID ..., ~/.aws/credentials)"
        )
    shown = ascii(mask(text))
    if not _SCHEME.match(text) or "::" in text:
        raise UsageError(f"{shown}, expected one address such as s3://bucket/prefix or file:///mnt/backup")
    rest = text.partition("://")[2].rstrip("/")
    # Libraries read these characters as patterns or queries, and `..` would lead out of the folder that was named.
    if re.search(r"[?#*\[\]\\\x00-\x20\x7f]", text) or {"..", "."} & set(rest.split("/")):
        raise UsageError(f"{shown}, expected an address without ?, #, *, brackets, spaces and `..`")
    if text.lower().startswith(("file://", "local://")) and not text.partition("://")[2].startswith("/"):
        raise UsageError(f"{shown}, expected three slashes and the whole path: file:///mnt/backup")
    if not rest:
        raise UsageError(f"{shown}, expected the name of a bucket or folder after ://")
    return text.rstrip("/")
