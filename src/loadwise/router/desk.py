"""What the router's parts share: the tables, the instant of the event at hand, and the commands that answer it.

The parts (`arriving`, `binding`, `dispatching`, `attempts`, `ending`, `lifecycle`, `pool`) hold no state of their own;
everything that a dump must carry hangs here.
"""

from collections.abc import Mapping

from loadwise.kernel import commands as c
from loadwise.kernel.ids import DecisionId, ProgramId, TurnId
from loadwise.kernel.pool import BackendSpec, ModelSpec
from loadwise.kernel.streams import Streams
from loadwise.policy.ladder import Ladder
from loadwise.policy.registry import Resolve
from loadwise.verify.debias import ErrorRates

from .admission import Admission
from .agenda import Agenda
from .backends import Backends
from .config import RouterConfig
from .counts import Counts
from .credit import Credit
from .divert import Divert
from .pacing import Pacing
from .program import CalledOff, Turn
from .residing import Residing
from .routing import Routing
from .spending import Spending
from .table import ProgramTable

CALLED_OFF_MAX = 1024
"""A host that is told to take an attempt back says soon how it ended, or never."""


class Desk:
    """The router's state, without any rule of when it changes."""

    def __init__(
        self,
        models: dict[str, ModelSpec],
        backends: tuple[BackendSpec, ...],
        config: RouterConfig,
        verifier_by_task_type: Mapping[str, str],
        seed: int,
        resolve: Resolve | None = None,
        error_rates: Mapping[str, ErrorRates] | None = None,
    ) -> None:
        streams = Streams(seed)
        self.config = config
        self.verifier_by_task_type = dict(verifier_by_task_type)
        self.error_rates_by_task_type = dict(error_rates or {})
        self.backends = Backends(models, backends)
        self.configured_pool = self.backends.digest()
        self.admission = Admission(config, self.backends, streams, resolve, self.policy_failed)
        self.residing = Residing(config.admission, self.backends, self.admission)
        self.credit = Credit(config, streams, resolve, self.policy_failed)
        self.divert = Divert(config, self.backends, self.admission)
        self.routing = Routing(config, self.backends, self.admission, self.credit, self.divert, streams)
        self.spending = Spending(config, self.backends)
        self.pacing = Pacing(config.feedback)
        escalation, context = config.escalation, config.context
        self.ladder: Ladder | None = None
        """Says when a further attempt pays; None where none is ever made."""
        if escalation is not None:
            self.ladder = Ladder(escalation.ladder(context.n_features, context.version), config.reward)
        self.agenda = Agenda()
        self.table = ProgramTable()
        self.admission.books.programs = self.table.by_id
        self.turns: dict[TurnId, Turn] = {}
        """Open turns."""
        self.admission.turns = self.turns
        self.called_off: dict[TurnId, CalledOff] = {}
        """Attempts taken back whose end has not been told yet, oldest first; `CALLED_OFF_MAX` at most."""
        self.asked: dict[DecisionId, ProgramId] = {}
        """Programs for which the user's selector has been asked."""
        self.counts = Counts()
        self.policy_failure: str | None = None
        """What last went wrong in a user's policy class; not part of the state."""
        self.now_s = float("-inf")
        self.timer_at_s: float | None = None
        """What the host was last told to wake us at; None where it has woken us since."""
        self.out: list[c.Command] = []
        """The answer to the event at hand."""

    def policy_failed(self, text: str, is_counted: bool) -> None:
        """A user's policy raised, or answered nonsense, and was left aside for that once."""
        self.policy_failure = text
        if is_counted:
            self.counts.policy_errors += 1
