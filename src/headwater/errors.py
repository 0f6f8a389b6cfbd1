"""Every error that Headwater raises on purpose.

HeadwaterError
|-- BadRequest          the caller's input is wrong (HTTP 4xx); names the field
|   |-- NeverFits       the request is longer than this engine can ever hold
|   `-- NoChatTemplate  the model has no chat template
|-- Overloaded          the queue is full; the same request may succeed later (HTTP 503)
|-- ConfigError         an option or a combination of options is wrong
|-- KernelError         the native kernels cannot be compiled or loaded
|-- ModelError          a model cannot be found, verified, read or understood
|   `-- ChecksumError   a downloaded or stored file is not the one expected
|-- BenchError          a measurement cannot be made, or cannot go on
|-- CacheError          the cache was asked for something it must refuse
|   |-- OutOfBlocks     the pool cannot give that many blocks now
|   |-- DoubleRelease   a reference was given back twice
|   |-- StaleLookup     the cache changed between a look-up and its claim
|   |-- CacheBusy       a reset while blocks are in use
|   `-- AuditError      an invariant does not hold: a bug in Headwater
|-- EventsError         a stream of KV events cannot be read, or does not answer
`-- EngineError         the engine failed
    `-- EngineDead      the engine process is gone
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of all errors that Headwater raises on purpose."""


class BadRequest(HeadwaterError):
    """The caller's input is wrong.

    ``field`` is the name of the offending field as the caller wrote it (None when it is the whole body).
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NeverFits(BadRequest):
    """The request needs more tokens or blocks than this engine can ever give to one request."""


class NoChatTemplate(BadRequest):
    """A chat request for a model without a chat template."""


class Overloaded(HeadwaterError):
    """The queue is full: nothing is wrong with the request, and it may succeed later."""


class ConfigError(HeadwaterError):
    """An option, or a combination of options, is wrong."""


class KernelError(HeadwaterError):
    """The native kernels cannot be compiled, loaded or used here.

    ``output`` is all that the compiler said, where it said anything.
    """

    def __init__(self, message: str, *, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class ModelError(HeadwaterError):
    """A model cannot be found, read or understood."""


class ChecksumError(ModelError):
    """A file is not the one that was expected."""


class BenchError(HeadwaterError):
    """A measurement cannot be made, or cannot go on: its server, its folder or what it found does not allow it."""


class CacheError(HeadwaterError):
    """The cache was asked for something it must refuse; its state is as before."""


class OutOfBlocks(CacheError):
    """The pool cannot give that many blocks now."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available")
        self.needed = needed
        self.available = available


class DoubleRelease(CacheError):
    """A reference was given back twice; the second time was refused."""


class StaleLookup(CacheError):
    """The cache changed between a look-up and its claim."""


class CacheBusy(CacheError):
    """A reset while blocks are in use."""

    def __init__(self, n_busy: int) -> None:
        super().__init__(f"{n_busy} blocks are in use by running requests")
        self.n_busy = n_busy


class AuditError(CacheError):
    """An invariant of the cache does not hold: a bug in Headwater."""


class EventsError(HeadwaterError):
    """A stream of KV events cannot be read: nobody answers, or what comes is not understood."""


class EngineError(HeadwaterError):
    """The engine failed."""


class EngineDead(EngineError):
    """The engine process is gone."""
