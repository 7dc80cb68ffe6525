"""What can go wrong, as one tree. Every message says what was wrong, what was expected and what to do.

    OffloadError
    ├── ConfigError          (ValueError)   an option's value or name; unknown keys
    ├── InputError           (ValueError)   a prompt, a file, a text, a request
    │   └── SessionBusyError                a session that is answering is asked for a second answer
    ├── ModelError           (ValueError)   unsupported architecture, missing weights, positions a model cannot have
    │   └── LogitsError                     what it computes is no numbers
    ├── ArtifactError        (ValueError)   a skew artifact: damaged, of another version, of another model
    ├── MemoryLimitError     (MemoryError)  more memory asked than there is, or than the limit allows
    │   └── PoolFullError                   the host pool has no chunk left for a sequence
    │       └── DeviceFullError             device_memory leaves no room for it
    ├── QueueFullError                      as many prompts wait as may wait
    ├── StoreError           (OSError)      the session store: lock, path, limit
    ├── DiskError            (OSError)      rows of a running context: a disk that cannot be read or written
    └── EngineError                         an unexpected exception ended a request; it is the `__cause__`

`assert` is for invariants of our own code; nothing a user does may trip one.
"""


class OffloadError(Exception):
    """Base of every error that a user of `offload_rt` can cause and can mend."""


class ConfigError(OffloadError, ValueError):
    """An option has a value outside its domain, or no such option exists."""


class InputError(OffloadError, ValueError):
    """A prompt, file or request cannot be used as it is."""


class SessionBusyError(InputError):
    """A session is answering; it has one answer at a time."""


class ModelError(OffloadError, ValueError):
    """A model cannot be loaded or cannot do what was asked of it. `reason` is a word for programs where the model is of
    a kind that does not run ("alibi", "latent_attention", ...); else it is empty."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class LogitsError(ModelError):
    """A model computes what is no numbers, whatever the request was: its weights or its dtype are to blame."""


class ArtifactError(OffloadError, ValueError):
    """A skew artifact is damaged, of another format version, or of another model."""


class MemoryLimitError(OffloadError, MemoryError):
    """More memory is needed than the machine has or the limit allows."""


class PoolFullError(MemoryLimitError):
    """The host pool cannot give the chunks a sequence needs."""


class DeviceFullError(PoolFullError):
    """A sequence could take more of the device than `device_memory` leaves: like a full pool, it waits for others."""


class QueueFullError(OffloadError):
    """As many prompts wait for the engine as may wait: the same prompt can be asked again later."""


class StoreError(OffloadError, OSError):
    """The session store cannot be opened or written."""


class DiskError(OffloadError, OSError):
    """Rows of a context that lies on disk cannot be read or written."""


class EngineError(OffloadError):
    """An unexpected exception ended a request, or all requests if the engine could not recover. The exception is the
    `__cause__`."""
