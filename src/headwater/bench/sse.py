"""Server-sent events out of bytes, however those are cut.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, as far as a completions stream needs it: fields
other than ``data`` and comments are passed over.
"""

from __future__ import annotations


class EventReader:
    """Collects chunks; gives back the data of each event that they complete. Text is decoded by whole events only,
    so that a chunk may end inside a character."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in ``chunk``; usually none or one."""
        lines = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        return [data for line in lines if (data := self._line(line)) is not None]

    def close(self) -> bytes:
        """What came after the last whole event; not empty means that the stream was cut off."""
        return b"\n".join([*self._data, self._rest]).strip()

    def _line(self, line: bytes) -> bytes | None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        return data
