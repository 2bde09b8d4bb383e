"""Credits: how many prompt tokens each router may send before a prefill of its own has begun.

A session has a share of the queue. What it sent and what hasn't begun is `used`; its balance is the rest. Shares are
redivided by need, so an idle router's share goes to those that have prompts waiting.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    share: int = 0
    used: int = 0
    demand: int = 0
    told: int | None = None

    @property
    def balance(self) -> int:
        return self.share - self.used


class CreditBook:
    """Balances of all sessions, in prompt tokens. Engine owner only.

    queue_tokens   sum of all shares, unless sessions × one block's tokens is more
    window_tokens  longest prompt: the overdraft of a session, as the last prompt may take a balance below zero
    """

    def __init__(self, *, queue_tokens: int, block_size: int, window_tokens: int) -> None:
        self._queue_tokens = queue_tokens
        self._least = block_size
        self._window_tokens = window_tokens
        self._accounts: dict[int, _Account] = {}

    @property
    def bound(self) -> int:
        """Prompt tokens that may be queued in all."""
        return self._total + self._window_tokens * len(self._accounts)

    @property
    def used(self) -> int:
        """Prompt tokens that are queued in all."""
        return sum(account.used for account in self._accounts.values())

    @property
    def _total(self) -> int:
        return max(self._queue_tokens, self._least * len(self._accounts))

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._accounts

    def open(self, session_id: int) -> None:
        """A session joins."""
        self._accounts[session_id] = _Account()
        self.divide()

    def close(self, session_id: int) -> None:
        """A session has ended; what it used is free. Idempotent."""
        if self._accounts.pop(session_id, None) is not None:
            self.divide()

    def demand(self, session_id: int, num_tokens: int) -> None:
        """So many tokens wait in that router for credit; weighs at the next division."""
        account = self._accounts.get(session_id)
        if account is not None:
            account.demand = num_tokens

    def take(self, session_id: int, num_tokens: int) -> bool:
        """A prompt was accepted from this session; False, and nothing taken, if the queue's bound forbids it."""
        if self.used + num_tokens > self.bound:
            return False
        self._accounts[session_id].used += num_tokens
        return True

    def give_back(self, session_id: int, num_tokens: int) -> None:
        """Its prefill has begun or its attempt has ended; no error after the session's end."""
        account = self._accounts.get(session_id)
        if account is not None:
            account.used -= num_tokens
            assert account.used >= 0, "more credit given back than taken"

    def divide(self) -> None:
        """Share the queue by need: at least one block's tokens each, small needs in full, the rest equally."""
        left = self._total
        by_need = sorted(self._accounts.values(), key=lambda account: account.used + account.demand)
        for index, account in enumerate(by_need):
            need = max(self._least, account.used + account.demand)
            account.share = min(need, left // (len(by_need) - index))
            left -= account.share
        for account in by_need:
            account.share += left // len(by_need)

    def news(self) -> list[tuple[int, int]]:
        """(session id, balance) of every session whose balance isn't what it was last told."""
        changed: list[tuple[int, int]] = []
        for session_id, account in self._accounts.items():
            if account.balance != account.told:
                account.told = account.balance
                changed.append((session_id, account.balance))
        return changed
