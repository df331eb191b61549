"""A request on its way through the engine: what was asked, what has been said so far, and the stream its client reads."""

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from angelspec_jax.answers import Completion, Delta
from angelspec_jax.tokenizer import Detokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of `time.monotonic`: when a request was submitted, said its first token, and ended."""

    submitted: float
    first: float | None = None
    ended: float | None = None


class Stream:
    """An answer as it comes: iterate over its `Delta`s, or wait for `result()`. Safe to use from any thread.

    Leaving it (`cancel`, the end of a `with` block, dropping the last reference) frees its slot.
    """

    def __init__(self, cancel: Callable[[], None], switch: Callable[[str | None], None]):
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._times: Times | None = None
        self._cancel, self._switch = cancel, switch
        weakref.finalize(self, cancel).atexit = False

    def __iter__(self):
        return self

    def __next__(self) -> Delta:
        delta = self._deltas.get()
        if delta is not None:
            return delta
        self._deltas.put(None)  # for whoever asks again
        if self._error is not None:
            raise self._error
        raise StopIteration

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.cancel()

    def cancel(self) -> None:
        """Stop decoding; what has been said stays readable, `finish_reason` is then "cancelled"."""
        self._cancel()

    def use(self, drafter: str | None) -> None:
        """Go on with another of the engine's drafters, or with none; the text stays the same. Raises ValueError for unknown names."""
        self._switch(drafter)

    @property
    def done(self) -> bool:
        return self._over.is_set()

    @property
    def times(self) -> Times | None:
        """When it was submitted, spoke and ended; None until it ended."""
        return self._times

    def result(self, timeout: float | None = None) -> Completion:
        """The whole answer. Raises TimeoutError when it is not there in time, or the error that ended the request."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the answer was not complete after {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion


class Feed:
    """The engine's end of a stream; it does not keep the stream alive."""

    def __init__(self, cancel: Callable[[], None], switch: Callable[[str | None], None]):
        self.stream: Stream | None = Stream(cancel, switch)
        self._weak = weakref.ref(self.stream)

    def hand_over(self) -> Stream:
        """The stream, once; from then on the client alone holds it."""
        stream, self.stream = self.stream, None
        assert stream is not None
        return stream

    def put(self, delta: Delta) -> None:
        if (stream := self._weak()) is not None:
            stream._deltas.put(delta)

    def end(self, times: Times, completion: Completion | None, error: BaseException | None = None) -> None:
        if (stream := self._weak()) is not None:
            stream._completion, stream._error, stream._times = completion, error, times
            stream._over.set()
            stream._deltas.put(None)


class StopText:
    """Holds back what may become a stop string, and cuts the text before the first one."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held = tuple(stops), ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown, and whether a stop string came."""
        self.held += text
        found = [place for place in (self.held.find(stop) for stop in self.stops) if place >= 0]
        if found:
            return self.held[: min(found)], True
        keep = max((self._overlap(stop) for stop in self.stops), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown, False

    def _overlap(self, stop: str) -> int:
        """Longest end of the held text that `stop` begins with."""
        return next((n for n in range(min(len(stop) - 1, len(self.held)), 0, -1) if stop.startswith(self.held[-n:])), 0)


@dataclasses.dataclass(eq=False)
class Request:
    """One request, owned by the engine's thread; only `cancelled` is set from outside."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Any  # `Sampling` of one request
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None
    stops: tuple[str, ...]
    client: str
    priority: int
    deadline: float | None  # of time.monotonic
    choice: list[int]  # one entry: which of the engine's drafters, -1 none; changed from outside by `Stream.use`
    feed: Feed
    cancelled: threading.Event
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    first: float | None = None
    said: list[int] = dataclasses.field(default_factory=list)  # stop token included
    text: str = ""
    rounds: int = 0
    attempts: int = 0
    over: bool = False
    number: int = 0  # order of submission

    def __post_init__(self):
        self._words = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        self._stop_text = StopText(self.stops)

    @property
    def known(self) -> list[int]:
        """Prompt and what was said: all that a slot needs to go on."""
        return [*self.prompt, *self.said]

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def say(self, tokens: Sequence[int]) -> None:
        """Deliver the tokens of a round, and end where a stop token, a stop string or the limit is reached."""
        if self.over or not tokens:
            return
        if self.first is None:
            self.first = time.monotonic()
        shown, ended, kept = "", None, []
        for token in tokens:  # one by one: a stop string may end inside a round
            kept.append(token)
            if token in self.stop_ids:
                ended = "stop"
                break
            if self._words is not None:
                piece, stopped = self._stop_text.push(self._words.push([token]))
                shown += piece
                if stopped:
                    ended = "stop"
                    break
        self.said += kept
        if ended is None and len(self.said) >= self.max_new_tokens:
            ended = "length"
        self.text += shown
        self.feed.put(Delta(shown, tuple(kept)))
        if ended is not None:
            self.end(ended)

    def end(self, reason: str) -> None:
        """Deliver what was held back and the whole answer."""
        if self.over:
            return
        stopped_by_text = reason == "stop" and not (self.said and self.said[-1] in self.stop_ids)
        if self._words is not None and not stopped_by_text:
            rest, _ = self._stop_text.push(self._words.finish())
            rest += self._stop_text.held if not any(stop in self._stop_text.held for stop in self.stops) else ""
            if rest:
                self.text += rest
                self.feed.put(Delta(rest, ()))
        kept = self.said[:-1] if self.said and self.said[-1] in self.stop_ids else self.said
        completion = Completion(self.text, tuple(kept), reason, self.rounds, len(self.said) / max(self.rounds, 1))
        self._close(completion, None)

    def fail(self, error: BaseException) -> None:
        """End with an error, which the client's next read raises."""
        if not self.over:
            self._close(None, error)

    def _close(self, completion: Completion | None, error: BaseException | None) -> None:
        self.over = True
        self.feed.end(Times(self.submitted, self.first, time.monotonic()), completion, error)
