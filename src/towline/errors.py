"""The exception tree: every error that Towline raises on purpose is a `TowlineError`, attributed to one boundary.

The base class of a branch names the boundary; the message says what happened, where, and what to do next. `failure` is the
`FailureReason` of a session that fails on the error, so that the same boundary is named in results and metrics. Private
exceptions (`_Name`) are control flow inside one module and never leave it.

    TowlineError
        ApiError                     harness and gateway: a model call that cannot be answered
            BadRequest
        ConfigError                  settings, files and folders of the user
            UnsafePath               a path that leaves its folder, or a link in it
            TaskError                task files
            TaskRefused              an untrusted task that names something of the host
            MissingVariable          environment variables of a task
            UnknownJournalFormat     a journal of another version
        EngineError                  gateway and engine
            EngineUnreachable
            HttpStatusError
            InvalidResponse
            EngineStalled
            ContextExceeded
            PoisonTurn
        FidelityError                tokens: the exactness invariant
        TemplateError                tokens: the chat template
        CannotContinue               tokens: a turn that starts a branch
        UnwritableReply              tokens: a reply that a format cannot express
        JournalError                 gateway and disk: the journal
            RecordError
            JournalCorrupt
        SessionError                 gateway: the control routes
        SandboxError                 node and sandbox
            Unsupported
                ImageUnavailable     an image that no registry has, or that this machine cannot pull
            PathMissing
            PullError                node and registry
            BuildahError             node and image store
            DockerError
            DockerfileError
            CleanSandboxError
        AddressRefused               common: a host that may not be connected to
        EgressRefused                sandbox and proxy: a request that is not forwarded
        ArchiveError                 sandbox: archives of files
        InstallError                 node and harness installs
        SetupError                   node: the task's own setup commands
        NoModelCalls                 node: a harness without model calls
        ModelCallFailed              node: a model call that infrastructure failed
        StageTimeout                 node: a stage other than RUN
        ComponentUnavailable         node: an open circuit breaker
        SessionCancelled             node: a cancelled session
        EvaluationError              node and evaluator
            AgentCaused              an evaluation that the agent made fail
        LimitExceeded                worker: hostile text beyond the limits of time or memory
        WorkerFailed                 worker: a parser's own error, or no worker
        EvaluationFailed             node and evaluator: the control run failed as well
        LaunchError                  cluster: Slurm or Kubernetes refused, or its program is missing
        NodeLost                     server and node
        NodeNotFound                 server and node: a node that does not exist
        HostError                    server and node host: a call that failed
        InvalidTask                  server and node: a task that can never run
        LogNotFound                  server and node: a log file that does not exist
        RequestError                 client and server: a rejected request
            InvalidInput
            Unauthorized
            Forbidden
            ResourceNotFound
            ResourceConflict
            QueueFull
            Unavailable
        StoreError                   server and database or object storage
            DamagedData
        SchemaError                  a record that violates the contract
            SchemaVersionError
        TransitionError              a session state that cannot follow
        ClientError                  trainer and client
            Unreachable
            WaitTimeout
            BadAnswer
            ServiceError             an error response of the service
                InvalidRequest
                NotAllowed
                NotFound
                Conflict
                Busy
        SessionFailed                trainer: a session without a usable result
        TooManyFailed                trainer: more failures than the run accepts
        NothingToLearn               trainer: groups that failed in a row
        NothingGenerated             trainer: a batch without usable sessions
        ExtraTracesError             trainer: more rows than the framework takes
        RowError                     trainer: a row that cannot be turned into a task
        WorkerError                  trainer: a rollout worker that failed
        AcceptError                  runs: an accept expression
        LedgerError                  runs: a folder that cannot be resumed
        EvalReportError              runs: a report that cannot be read or compared
        CommandInterrupted           cli: an interrupted command
        VirtualTimeStuck             benchmarks: a simulation without a next event
        BenchmarkFailed              benchmarks: a service that did not do its work
        GatewayRefused               audit: an error response of the gateway
        TemplateRefused              audit: a template that rejects the messages
        ClientDisconnected           audit: a scripted disconnection
"""

from __future__ import annotations

from enum import StrEnum


class TowlineError(Exception):
    """Base class of every error that Towline raises on purpose."""

    failure = "internal"
    """The `FailureReason` of a session that fails on it."""


class ErrorKind(StrEnum):
    """What went wrong with a model call; each dialect maps it to its provider's status and code."""

    BAD_REQUEST = "bad_request"
    """The request is malformed or asks for something that is not supported."""
    UNAUTHORISED = "unauthorised"
    """The key is missing or unknown, or its session has ended."""
    NOT_FOUND = "not_found"
    """No such route or object."""
    METHOD = "method_not_allowed"
    """The route exists, but not with this HTTP method."""
    TOO_LARGE = "too_large"
    """The body exceeds the size limit."""
    CONTEXT_LENGTH = "context_length"
    """The prompt does not fit the model's context or the session's context limit."""
    QUOTA = "quota"
    """A limit of the session is used up (turns, sampled tokens, wall clock). Retrying does not help."""
    RATE_LIMIT = "rate_limit"
    """Too many requests at once. Retrying later helps."""
    OVERLOADED = "overloaded"
    """The engine is unreachable or full. Retrying helps."""
    INTERNAL = "internal"
    """A defect of Towline."""


class ApiError(TowlineError):
    """A model call that cannot be answered; the message is for the harness."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        capability: str = "",
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        """The invalid field, in the path notation of the dialect (`messages[3].content`)."""
        self.retry_after = retry_after
        self.capability = capability
        """The capability that the model lacks, in one word, if clients know one for it."""


class BadRequest(ApiError):
    """The body is not valid in its dialect."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(ErrorKind.BAD_REQUEST, message, param=param)


class ConfigError(TowlineError):
    """A setting, file or folder that cannot be used; the message says what to do."""

    failure = "config"


class EngineError(TowlineError):
    """The engine failed or violated its contract."""

    failure = "engine"


class FidelityError(TowlineError):
    """The exactness invariant is violated. Never caught, and never downgraded to a warning."""


class StoreError(TowlineError):
    """The store cannot be opened or is not what it should be; the operator has to act."""


class DamagedData(StoreError):
    """A segment is not what its row says."""
