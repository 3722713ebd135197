"""Every error nanoserve raises on purpose. A message gives the actual value, the limit and the remedy.

`ClientError` is the request's fault, `Unavailable` is the server's state, `StartupError` is the operator's
configuration or machine, `GateError` is a broken invariant of ours. Imports nothing, so that every layer may raise
them.
"""

from __future__ import annotations


class NanoserveError(Exception):
    """Base of every deliberate error."""


# --- the request is wrong ---------------------------------------------------------------------------------------


class ClientError(NanoserveError):
    """A request that cannot be served as it stands; nothing was changed by it.

    `param` names the offending field (dotted, as the client wrote it) and `code` is the machine-readable reason.
    """

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(ClientError):
    """A field has a value outside its range or of the wrong type."""


class Unsupported(ClientError):
    """A field is understood but this deployment cannot honour it."""

    code = "unsupported"


class ContextLengthExceeded(ClientError):
    """Prompt (plus the tokens asked for) cannot fit the model's context or the K/V pool."""

    code = "context_length_exceeded"


class ModelNotFound(ClientError):
    """The request names a model this process does not serve."""

    code = "model_not_found"


# --- the server cannot take it now -------------------------------------------------------------------------------


class Unavailable(NanoserveError):
    """The request is fine but cannot be taken now. `retry_after_seconds` is an honest estimate, or None if never."""

    code: str = "unavailable"

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class NotReady(Unavailable):
    """The engine is still loading or warming up."""

    code = "not_ready"


class Draining(Unavailable):
    """The process is shutting down."""

    code = "draining"


class QueueFull(Unavailable):
    """The waiting queue is at its limit."""

    code = "queue_full"


class EngineFailed(Unavailable):
    """A step raised; the engine serves nothing any more."""

    code = "engine_failed"


# --- the operator has to act -------------------------------------------------------------------------------------


class StartupError(NanoserveError):
    """The process cannot start as configured: one line for the terminal and the code it exits with."""

    exit_code = 2


class PortTaken(StartupError):
    """Another process listens on the address."""

    exit_code = 3


class ModelUnavailable(StartupError):
    """The model argument names nothing that can be opened here."""

    exit_code = 4


class BadCheckpoint(StartupError):
    """A model file is missing, truncated, or holds a tensor or field the decoder cannot take."""

    exit_code = 5


class OutOfMemory(StartupError):
    """Weights, K/V pool or a capture do not fit; the message names the flag to lower."""

    exit_code = 6


class ConfigError(StartupError):
    """Flags that contradict each other or the model."""

    exit_code = 2


class KernelBuildError(StartupError):
    """The native kernels cannot be compiled or loaded here; the message names the remedy."""

    exit_code = 7


# --- our own invariants ------------------------------------------------------------------------------------------


class GateError(NanoserveError):
    """A plan, a window or an address is not what a graph may be recorded or replayed on."""


class PoolExhausted(NanoserveError):
    """The block pool has fewer free blocks than were asked for. The scheduler answers it by preempting."""
