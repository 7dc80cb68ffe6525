"""The exceptions of offload_rt. Every message states the problem, the expected value and the remedy.

    OffloadError
    ├── ConfigError          (ValueError)
    ├── InputError           (ValueError)
    │   └── SessionBusyError
    ├── ModelError           (ValueError)
    │   └── LogitsError
    ├── ArtifactError        (ValueError)
    ├── MemoryLimitError     (MemoryError)
    │   └── PoolFullError
    │       └── DeviceFullError
    ├── QueueFullError
    ├── StoreError           (OSError)
    │   └── StoreInUseError
    ├── DiskError            (OSError)
    └── EngineError

`assert` is for internal invariants only. No user input may cause an AssertionError.
"""


class OffloadError(Exception):
    """Base class of all errors of this package."""


class ConfigError(OffloadError, ValueError):
    """An option has an invalid value or does not exist."""


class InputError(OffloadError, ValueError):
    """A prompt, file or request is invalid."""


class SessionBusyError(InputError):
    """The session is running another request. A session runs one request at a time."""


class ModelError(OffloadError, ValueError):
    """The model cannot be loaded, or the request exceeds what the model supports.

    Attributes:
        reason: Machine-readable name of an unsupported feature ("alibi", "recurrent", ...), or "".
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class LogitsError(ModelError):
    """The model's logits are NaN or infinite. The cause is the model's weights or dtype, not the request."""


class ArtifactError(OffloadError, ValueError):
    """A skew artifact is damaged, has a different format version, or belongs to another model."""


class MemoryLimitError(OffloadError, MemoryError):
    """More memory is needed than the machine has or a limit allows."""


class PoolFullError(MemoryLimitError):
    """The KV cache in host memory has too few free blocks for a sequence."""


class DeviceFullError(PoolFullError):
    """A sequence may need more device memory than `device_memory` leaves. It may fit after other requests end."""


class QueueFullError(OffloadError):
    """The request queue is full. Send the request again later."""


class StoreError(OffloadError, OSError):
    """The session store cannot be opened, read or written."""


class StoreInUseError(StoreError):
    """Another process is writing to the session store. The store can still be read."""


class DiskError(OffloadError, OSError):
    """The KV of a running context cannot be read from or written to its disk."""


class EngineError(OffloadError):
    """An unexpected exception (`__cause__`) ended a request. If the engine could not recover, it ended all requests."""
