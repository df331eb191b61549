"""Requests that wait for a slot: a bounded queue, by priority, and among equals fair to clients."""

import collections
import dataclasses
from typing import Generic, TypeVar

Item = TypeVar("Item")


class QueueFull(RuntimeError):
    """The queue holds as many requests as it may; the caller should slow down and try again."""


@dataclasses.dataclass(frozen=True)
class Ticket(Generic[Item]):
    item: Item
    client: str
    priority: int
    work: int  # tokens it will cost at most


class FairQueue(Generic[Item]):
    """The highest priority first; within one, the client that has been given the least work so far, in tokens (start-time fair queueing).

    A client that comes back after a pause starts level with the others: pauses save up nothing.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._lines: dict[tuple[int, str], collections.deque[Ticket[Item]]] = {}
        self._given: dict[str, float] = {}
        self._now = 0.0  # what the client served last had been given then

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def push(self, item: Item, client: str = "", priority: int = 0, work: int = 1, *, again: bool = False) -> None:
        """Line up; with `again` a request that had been served and was interrupted goes to the front, and is never refused."""
        if not again and len(self) >= self.limit:
            raise QueueFull(f"{self.limit} requests are waiting, which is the most this engine queues; try again later")
        line = self._lines.setdefault((priority, client), collections.deque())
        self._given[client] = max(self._given.get(client, 0.0), self._now)
        ticket = Ticket(item, client, priority, 0 if again else work)
        if again:
            line.appendleft(ticket)
        else:
            line.append(ticket)

    def priority(self) -> int | None:
        """The highest priority that waits."""
        return max((priority for priority, _ in self._lines), default=None)

    def pop(self) -> Item:
        """The next request. Raises IndexError when none waits."""
        if not self._lines:
            raise IndexError("no request waits")
        key = min(self._lines, key=lambda key: (-key[0], self._given[key[1]]))
        ticket = self._lines[key].popleft()
        if not self._lines[key]:
            del self._lines[key]
        self._now = max(self._now, self._given[ticket.client])
        self._given[ticket.client] += ticket.work
        waiting = {client for _, client in self._lines}
        self._given = {client: given for client, given in self._given.items() if client in waiting or given > self._now}
        return ticket.item

    def remove(self, unwanted) -> list[Item]:
        """Take out every request for which `unwanted(item)` holds."""
        out: list[Item] = []
        for key in list(self._lines):
            kept = collections.deque(ticket for ticket in self._lines[key] if not unwanted(ticket.item))
            out += [ticket.item for ticket in self._lines[key] if unwanted(ticket.item)]
            if kept:
                self._lines[key] = kept
            else:
                del self._lines[key]
        return out
