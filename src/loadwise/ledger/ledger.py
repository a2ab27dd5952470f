"""The account of reservations: reserve, extend, release; check, then act.

Theory of operation. Each backend has one account in its own unit: KV tokens, slots, or requests per minute. A
reservation is held under a key (a program's id, or `turn:<id>` where a single turn is covered). Admission stops at
`admission_ratio` of the capacity; growth of what already runs may pass it, since nothing is evicted, and then only
admission stops. An empty account admits its head whatever its size, or a program larger than the limit would wait for
ever. Requests per minute stay spent for 60 s after they were granted, released or not.

Backends that share one KV cache (several models on one GPU) form a *pool*: each counts in its own tokens, of which the
whole cache holds `capacity`, and what all of them have promised together, as shares of the cache, is held against the
limit. A prompt that all programs of a backend begin with is counted once, for as long as anything is held there.

References: ORACLE, appendix B.2 (reservation bound of 85 %, release when the program's last call returns), E.2 (two
models that share one KV cache).
"""

from bisect import bisect_right

import msgspec

from loadwise.kernel.errors import LawBroken
from loadwise.kernel.pool import CapacityUnit

RATE_WINDOW_S = 60.0
SHARE = 1 << 40
"""Units of a shared cache: backends count in tokens of different sizes, and sums must be exact."""


def _share(tokens: int, capacity: int) -> int:
    """Tokens as a share of the cache that holds `capacity` of them, rounded up."""
    return -(-tokens * SHARE // capacity)


class Account(msgspec.Struct, kw_only=True):
    """One backend's promises. Amounts are integers in `unit`."""

    unit: CapacityUnit
    capacity: int
    amount_by_key: dict[str, int] = {}
    reserved: int = 0
    granted_at_s: list[float] = []
    """Instants of grants within the rate window; used by requests per minute only."""
    pool: str | None = None
    """Name of the KV cache that it shares with other backends."""
    common: int = 0
    """Tokens of the prompt that all programs here begin with: counted once, and left out of every amount."""

    @property
    def used(self) -> int:
        """What is promised here, the common prompt included."""
        return self.reserved + (self.common if self.amount_by_key else 0)


class Ledger:
    """All accounts of the pool.

    >>> ledger = Ledger(admission_ratio=0.85)
    >>> ledger.add("a", CapacityUnit.KV_TOKENS, 1000)
    >>> ledger.reserve("p1", "a", 800, at_s=0.0), ledger.reserve("p2", "a", 100, at_s=0.0)
    (True, False)
    >>> ledger.release("p1", "a")
    >>> ledger.headroom("a", at_s=0.0)
    1000
    """

    def __init__(self, admission_ratio: float = 0.85) -> None:
        self.admission_ratio = admission_ratio
        self.account_by_backend: dict[str, Account] = {}

    def add(self, backend_id: str, unit: CapacityUnit, capacity: int, pool: str | None = None) -> None:
        """Open an account; an open one keeps its reservations and takes the new capacity.

        Args:
            pool: the KV cache that it shares with other backends; `capacity` is all of it, in this backend's tokens.

        Raises:
            LawBroken: L4, an open account in another unit still holds reservations.
        """
        account = self.account_by_backend.get(backend_id)
        if account is None or (account.unit is not unit and not account.amount_by_key):
            self.account_by_backend[backend_id] = Account(unit=unit, capacity=capacity, pool=pool)
        elif account.unit is not unit:
            raise LawBroken("L4", f"backend {backend_id!r} holds {account.unit} and is to be counted in {unit}")
        else:
            account.capacity, account.pool = capacity, pool

    def recount(self, backend_id: str, unit: CapacityUnit, capacity: int, amount_by_key: dict[str, int]) -> None:
        """Count an account in another unit from now on.

        Args:
            amount_by_key: what each that holds something there holds in that unit.

        Raises:
            LawBroken: L4, others hold something than are given amounts.
        """
        account = self.account_by_backend[backend_id]
        if account.amount_by_key.keys() != amount_by_key.keys():
            raise LawBroken(
                "L4", f"backend {backend_id!r} is counted in {unit}, but not for all that hold {account.unit}"
            )
        self.account_by_backend[backend_id] = Account(
            unit=unit,
            capacity=capacity,
            pool=account.pool,
            amount_by_key=dict(amount_by_key),
            reserved=sum(amount_by_key.values()),
        )

    def members(self, backend_id: str) -> list[str]:
        """Backends whose promises fill the same KV cache, itself among them."""
        pool = self.account_by_backend[backend_id].pool
        if pool is None:
            return [backend_id]
        return [b for b, account in self.account_by_backend.items() if account.pool == pool]

    def remove(self, backend_id: str) -> None:
        """Close an account together with what it still holds."""
        self.account_by_backend.pop(backend_id, None)

    def reserve(self, key: str, backend_id: str, amount: int, *, at_s: float, is_bound: bool = True) -> bool:
        """Promise `amount` under `key`, or change nothing and say False.

        Args:
            is_bound: hold it against the limit; without, KV tokens are only counted (another gate has let it in).

        Raises:
            LawBroken: L5, the key already holds one there; L4, the amount is negative.
        """
        account = self.account_by_backend[backend_id]
        if key in account.amount_by_key:
            raise LawBroken("L5", f"{key!r} already holds a reservation on backend {backend_id!r}")
        if amount < 0:
            raise LawBroken("L4", f"{key!r} asks for {amount} on backend {backend_id!r}")
        is_counted = account.unit is CapacityUnit.KV_TOKENS and not is_bound
        if not is_counted and not self.fits(backend_id, amount, at_s=at_s):
            return False
        account.amount_by_key[key] = amount
        account.reserved += amount
        if account.unit is CapacityUnit.REQUESTS_PER_MINUTE:
            del account.granted_at_s[: len(account.granted_at_s) - self._n_granted(account, at_s)]
            account.granted_at_s.append(at_s)
        return True

    def fits(self, backend_id: str, amount: int, *, at_s: float) -> bool:
        """Whether `reserve` would grant `amount` now."""
        account = self.account_by_backend[backend_id]
        if account.unit is CapacityUnit.REQUESTS_PER_MINUTE:
            return self._n_granted(account, at_s) + amount <= account.capacity
        if account.pool is not None:
            return self._fits_pool(backend_id, amount)
        common = account.common if account.unit is CapacityUnit.KV_TOKENS else 0
        return not account.amount_by_key or account.reserved + common + amount <= self.limit(backend_id)

    def _fits_pool(self, backend_id: str, amount: int) -> bool:
        """Whether the shared cache has room: an empty one always, else by the shares of all who use it."""
        if not any(self.account_by_backend[b].amount_by_key for b in self.members(backend_id)):
            return True
        account = self.account_by_backend[backend_id]
        common = 0 if account.amount_by_key else account.common
        share = self.used_share(backend_id) + _share(amount + common, account.capacity)
        return share <= int(SHARE * self.admission_ratio)

    def used_share(self, backend_id: str) -> int:
        """Promised share of the KV cache, by all backends that use it, in units of 1 / `SHARE`, rounded up each."""
        return sum(_share(a.used, a.capacity) for a in map(self.account_by_backend.get, self.members(backend_id)) if a)

    def set_common(self, backend_id: str, tokens: int) -> None:
        """Say how long the prompt is that all programs of a backend begin with.

        Where it turns out to be shorter, everybody who was granted less for it holds the difference from now on.
        """
        account = self.account_by_backend[backend_id]
        if account.unit is not CapacityUnit.KV_TOKENS or tokens == account.common:
            return
        if tokens < account.common:
            for key in account.amount_by_key:
                self.extend(key, backend_id, account.amount_by_key[key] + account.common - tokens)
        account.common = tokens

    def limit(self, backend_id: str) -> int:
        """The amount at which admission stops; a share of KV tokens, all of slots and requests."""
        account = self.account_by_backend[backend_id]
        if account.unit is CapacityUnit.KV_TOKENS:
            return int(account.capacity * self.admission_ratio)
        return account.capacity

    def extend(self, key: str, backend_id: str, amount: int) -> int:
        """Set the amount held under `key` and return the change; growth may pass the admission limit."""
        account = self.account_by_backend[backend_id]
        change = amount - account.amount_by_key[key]
        account.reserved += change
        account.amount_by_key[key] = amount
        return change

    def release(self, key: str, backend_id: str) -> None:
        """Give back what `key` holds."""
        account = self.account_by_backend.get(backend_id)
        if account is not None:
            account.reserved -= account.amount_by_key.pop(key)

    def holds(self, key: str, backend_id: str) -> bool:
        """Whether `key` has a live reservation on the backend."""
        account = self.account_by_backend.get(backend_id)
        return account is not None and key in account.amount_by_key

    def unit(self, backend_id: str) -> CapacityUnit:
        """The unit of the backend's account."""
        return self.account_by_backend[backend_id].unit

    def headroom(self, backend_id: str, *, at_s: float) -> int:
        """Capacity minus what is reserved (law L4); negative when what runs has outgrown it."""
        account = self.account_by_backend[backend_id]
        if account.unit is CapacityUnit.REQUESTS_PER_MINUTE:
            return account.capacity - self._n_granted(account, at_s)
        if account.pool is not None:  # what others have promised of the cache is not there for this one either
            return account.capacity - -(-self.used_share(backend_id) * account.capacity // SHARE)
        return account.capacity - account.used

    def headroom_ratio(self, backend_id: str, *, at_s: float) -> float:
        """Share of the admission limit that is still free; <= 0 when admission has stopped."""
        limit = self.limit(backend_id)
        free = self.headroom(backend_id, at_s=at_s) - (self.account_by_backend[backend_id].capacity - limit)
        return free / max(limit, 1)

    def frees_at_s(self, backend_id: str, *, at_s: float) -> float | None:
        """When, after `at_s`, time alone frees something here: the oldest request leaves the rate window. Or None."""
        account = self.account_by_backend[backend_id]
        if account.unit is not CapacityUnit.REQUESTS_PER_MINUTE:
            return None
        n_granted = self._n_granted(account, at_s)
        return account.granted_at_s[-n_granted] + RATE_WINDOW_S if n_granted else None

    def check(self) -> None:
        """Raise `LawBroken` where an account does not add up (law L4)."""
        for backend_id, account in self.account_by_backend.items():
            total = sum(account.amount_by_key.values())
            if total != account.reserved:
                raise LawBroken("L4", f"backend {backend_id!r}: reserved {account.reserved} but holds {total}")
            if account.common < 0 or any(amount < 0 for amount in account.amount_by_key.values()):
                raise LawBroken("L4", f"backend {backend_id!r} holds a negative reservation")

    @staticmethod
    def _n_granted(account: Account, at_s: float) -> int:
        """Grants within the window that ends at `at_s`; looks only."""
        granted = account.granted_at_s
        return len(granted) - bisect_right(granted, at_s, key=lambda granted_at_s: granted_at_s + RATE_WINDOW_S)
