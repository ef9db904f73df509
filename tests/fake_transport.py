"""Drafters at the end of a network that loses, repeats, delays and damages frames, all in virtual time.

The frames are real ones: they are encoded, read by the drafter's `FrameService`, and answered with bytes. Only the
wires and the clock are made up. Nothing sleeps: whoever waits moves the clock on to the next event.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from common.draft_codec import (
    DraftCodecError,
    decode_drafter_frame,
    encode_reply,
    encode_update,
    encode_verifier_hello,
)
from common.draft_exchange import (
    BranchBatch,
    DrafterHello,
    DraftReply,
    RowClosed,
    RowCommitted,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from drafter_svc.core import DrafterCore
from drafter_svc.frame_service import FrameService
from drafter_svc.worker_link import Kind, Message, unpack_all
from verifier_svc.drafts.transport import Arrival, TransportSession

MAX_WAITING_FRAMES = 64
HELLO_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls the frames after the hello. Rates are chances for each frame, 0 to 1."""

    delay_s: tuple[float, float] = (0.0001, 0.0004)
    """One way; frames of one direction stay in order."""
    late: float = 0.0
    late_s: float = 0.05
    """A late frame is overtaken by those behind it."""
    lost: float = 0.0
    repeated: float = 0.0
    damaged: float = 0.0
    """One number in it is wrong: a token, a base_len, a generation, a row."""
    garbled: float = 0.0
    """Some bytes are others."""
    reset: float = 0.0
    """The connection ends."""


class Network:
    """Virtual time, and what is on its way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something happen later; of events of one time the first one named comes first."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def advance(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """Let time go by, at most until a condition holds."""
        end = self.now + seconds
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return
            at, _, action = heapq.heappop(self._events)
            self.now = max(self.now, at)
            action()


@dataclass(slots=True)
class _Connection:
    """One stream between a transport and a drafter."""

    transport: FakeTransport
    number: int
    is_open: bool = True
    is_answered: bool = False
    session: int = 0
    num_unread: int = 0
    down_at: float = 0.0  # arrival of the last frame in order, each way
    up_at: float = 0.0


class FakeDrafter:
    """A drafter that can crash, come back as another incarnation, and hang.

    Args:
        network: carries its frames.
        build_core: makes the drafter of each incarnation.
        work_s: how long it takes over one batch of frames, least and most.
    """

    def __init__(
        self, network: Network, build_core: Callable[[], DrafterCore], work_s: tuple[float, float] = (0.0001, 0.0005)
    ) -> None:
        self._network = network
        self._build_core = build_core
        self._work_s = work_s
        self._connections: dict[int, _Connection] = {}
        self._inbox: list[Message] = []
        self._is_working = False
        self._hung_until = 0.0
        self.incarnation = 0
        self.core: DrafterCore | None = None
        self._service: FrameService | None = None
        self.num_malformed_frames = 0
        self.num_repeated_frames = 0
        self.restart()

    @property
    def is_alive(self) -> bool:
        return self.core is not None

    @property
    def is_hung(self) -> bool:
        return self._network.now < self._hung_until

    @property
    def num_rows(self) -> int:
        """Sessions that are open."""
        return 0 if self.core is None else self.core.load().num_rows

    def crash(self) -> None:
        """Gone without a word; the other ends notice a moment later."""
        self.core = self._service = None
        self._inbox.clear()
        self._hung_until = 0.0
        for connection in list(self._connections.values()):
            self._drop(connection)

    def restart(self) -> None:
        """Another process, which knows nothing. One that runs is left alone."""
        if self.core is None:
            self.core = self._build_core()
            self._service = FrameService(self.core)
            self.incarnation += 1

    def hang(self, seconds: float) -> None:
        """Read and say nothing for a while, and then go on where it was."""
        self._hung_until = max(self._hung_until, self._network.now + seconds)

    def connect(self, connection: _Connection) -> bool:
        if not self.is_alive:
            return False
        self._connections[connection.number] = connection
        return True

    def receive(self, connection: _Connection, kind: Kind, payload: bytes = b"") -> None:
        """Something has arrived on a stream."""
        if connection.number not in self._connections:
            return
        if kind is Kind.END:
            del self._connections[connection.number]
        self._inbox.append(Message(kind, connection.number, 0, payload))
        if not self._is_working:
            self._is_working = True
            self._network.after(self._network.rng.uniform(*self._work_s), self._work)

    def _work(self) -> None:
        if self.is_hung:
            self._network.after(self._hung_until - self._network.now, self._work)
            return
        self._is_working = False
        messages, self._inbox = self._inbox, []
        if self._service is None or not messages:
            return
        for message in messages:
            if message.stream in self._connections:
                self._connections[message.stream].num_unread -= message.kind == Kind.FRAME
        service = self._service
        counts = service.num_malformed_frames, service.num_repeated_frames
        answers = unpack_all(bytearray(b"".join(service.handle(messages))))
        self.num_malformed_frames += service.num_malformed_frames - counts[0]
        self.num_repeated_frames += service.num_repeated_frames - counts[1]
        for answer in answers:
            connection = self._connections.get(answer.stream)
            if connection is None:
                continue
            if answer.kind == Kind.END:
                self._drop(connection)
                self.receive_end(answer.stream)
            else:
                self._answer(connection, answer.payload)

    def _answer(self, connection: _Connection, payload: bytes) -> None:
        connection.transport.carry_down(connection, payload, is_hello=not connection.is_answered)
        connection.is_answered = True

    def receive_end(self, stream: int) -> None:
        """The stream that the service has refused is over for it too."""
        if self._service is not None:
            self._service.handle([Message(Kind.END, stream, 0, b"")])

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.number, None)
        self._network.after(0.0005, lambda: connection.transport.lose(connection))


class FakeTransport:
    """A `DraftTransport` over the made-up network; connects again and again, with backoff.

    Args:
        network: carries the frames.
        drafter: the other end.
        hello: how the verifier introduces itself.
        faults: what befalls the frames; may be exchanged at any time.
        address: for logs.
    """

    kind = "fake"
    _numbers = count(1)

    def __init__(
        self,
        network: Network,
        drafter: FakeDrafter,
        hello: VerifierHello,
        faults: Faults,
        address: str = "fake",
    ) -> None:
        self.address = address
        self.faults = faults
        self._network = network
        self._drafter = drafter
        self._hello = hello
        self._session: TransportSession | None = None
        self._num_sessions = 0
        self._next_sequence = 1
        self._arrivals: list[Arrival] = []
        self._backoff = MIN_BACKOFF_S
        self._is_closed = False
        self._connection = _Connection(self, 0, is_open=False)
        self.num_malformed_frames = 0
        self.num_faults = 0
        self.num_branches_received = 0
        self._connect()

    @property
    def session(self) -> TransportSession | None:
        return self._session

    def send(self, update: SessionUpdate) -> int | None:
        """See `DraftTransport.send`."""
        if self._session is None:
            return None
        if self._hits(self.faults.damaged):
            update = _damage_update(update, self._network.rng)
        frames = encode_update(update, self._next_sequence, self._session.drafter.limits.max_frame_tokens)
        self._next_sequence += len(frames)
        connection = self._connection
        if connection.num_unread + len(frames) > MAX_WAITING_FRAMES:
            self._end(connection)
            return None
        for frame in frames:
            self._carry_up(connection, frame)
        return self._next_sequence - 1

    def poll(self, timeout_s: float) -> list[Arrival]:
        """See `DraftTransport.poll`."""
        # A wait that is too short to show in the clock would be repeated for ever.
        self._network.advance(max(timeout_s, 1e-6) if timeout_s > 0 else 0.0, lambda: bool(self._arrivals))
        arrivals, self._arrivals = self._arrivals, []
        self.num_branches_received += sum(len(arrival.reply.branches) for arrival in arrivals)
        return arrivals

    def close(self) -> None:
        """See `DraftTransport.close`."""
        self._is_closed = True
        self._end(self._connection)

    def lose(self, connection: _Connection) -> None:
        """The connection has broken, and that was noticed."""
        if connection.is_open:
            self._end(connection)

    # Connecting.

    def _give_up(self, connection: _Connection) -> None:
        if not connection.session:
            self.lose(connection)

    def _connect(self) -> None:
        if self._is_closed:
            return
        connection = self._connection = _Connection(self, next(self._numbers))
        if not self._drafter.connect(connection):
            connection.is_open = False
            self._try_again()
            return
        connection.num_unread += 1
        self._send_up(connection, encode_verifier_hello(self._hello))
        self._network.after(HELLO_TIMEOUT_S, lambda: self._give_up(connection))

    def _end(self, connection: _Connection) -> None:
        """End a session and open the next one a little later."""
        if not connection.is_open:
            return
        connection.is_open = False
        self._session = None
        self._network.after(self._delay(), lambda: self._drafter.receive(connection, Kind.END))
        if connection.session:
            self._backoff = MIN_BACKOFF_S
        self._try_again()

    def _try_again(self) -> None:
        if not self._is_closed:
            self._network.after(self._backoff * self._network.rng.uniform(0.5, 1.5), self._connect)
            self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)

    # Frames.

    def _carry_up(self, connection: _Connection, frame: bytes) -> None:
        for copy, late_s in self._copies(connection, frame):
            connection.num_unread += 1
            self._send_up(connection, copy, late_s)

    def _send_up(self, connection: _Connection, frame: bytes, late_s: float = 0.0) -> None:
        if not late_s:
            connection.up_at = self._in_order(connection.up_at)
        delay = late_s or connection.up_at - self._network.now
        self._network.after(delay, lambda: self._drafter.receive(connection, Kind.FRAME, frame))

    def carry_down(self, connection: _Connection, frame: bytes, is_hello: bool) -> None:
        """The drafter has sent a frame."""
        if not is_hello and self._hits(self.faults.damaged):
            frame = _damage_reply(frame, self._network.rng)
        copies = [(frame, 0.0)] if is_hello else self._copies(connection, frame)
        for copy, late_s in copies:
            if not late_s:
                connection.down_at = self._in_order(connection.down_at)
            delay = late_s or connection.down_at - self._network.now
            self._network.after(delay, lambda copy=copy: self._arrive(connection, copy))

    def _arrive(self, connection: _Connection, frame: bytes) -> None:
        """Replies of a session that has ended are passed on too: the exchange must refuse them by itself."""
        try:
            content = decode_drafter_frame(frame, self._hello.branch_len * self._hello.branch_budget * 4096)
        except DraftCodecError:
            self.num_malformed_frames += 1
            return
        if not isinstance(content, DrafterHello):
            if connection.session:
                self._arrivals.append(Arrival(connection.session, self._network.now, content))
        elif connection.is_open and not connection.session:
            self._num_sessions += 1
            connection.session = self._num_sessions
            self._session = TransportSession(connection.session, content)

    def _copies(self, connection: _Connection, frame: bytes) -> list[tuple[bytes, float]]:
        """The copies of a frame that get through, and for those that do so out of order, how late they are."""
        faults, rng = self.faults, self._network.rng
        if self._hits(faults.reset):
            self._network.after(self._delay(), lambda: self.lose(connection))
            return []
        if self._hits(faults.lost):
            return []
        if self._hits(faults.garbled):
            frame = _garble(frame, rng)
        late_s = rng.uniform(1e-6, faults.late_s) if self._hits(faults.late) else 0.0
        return [(frame, late_s), (frame, 0.0)] if self._hits(faults.repeated) else [(frame, late_s)]

    def _hits(self, chance: float) -> bool:
        hit = chance > 0 and self._network.rng.random() < chance
        self.num_faults += hit
        return hit

    def _delay(self) -> float:
        return self._network.rng.uniform(*self.faults.delay_s)

    def _in_order(self, last: float) -> float:
        """When a frame arrives that was sent now, behind the last one."""
        return max(last, self._network.now + self._delay())


_WRONG_NUMBERS = (-(1 << 31), -1, 0, 1, 2, 63, 1 << 20, (1 << 31) - 1)


def _damage_update(update: SessionUpdate, rng: random.Random) -> SessionUpdate:
    """The update with one number changed, in a copy; what is left out of a list is left out of the copy."""
    kinds = [name for name in ("closed", "opened", "committed") if getattr(update, name)]
    if not kinds:
        return update
    kind = rng.choice(kinds)
    changes: list[RowClosed | RowOpened | RowCommitted] = list(getattr(update, kind))
    index = rng.randrange(len(changes))
    change = changes[index]
    match change, rng.randrange(4):
        case (RowClosed() | RowCommitted()) as entry, 0:
            changes[index] = entry._replace(row=_wrong(entry.row, rng))
        case (RowClosed() | RowCommitted()) as entry, 1:
            changes[index] = entry._replace(generation=_wrong(entry.generation, rng))
        case RowCommitted() as entry, 2:
            changes[index] = entry._replace(base_len=_wrong(entry.base_len, rng))
        case ((RowCommitted() as entry), 3):
            changes[index] = entry._replace(token_ids=_wrong_tokens(entry.token_ids, rng))
        case RowOpened() as entry, 0:
            changes[index] = replace(entry, row=_wrong(entry.row, rng))
        case RowOpened() as entry, 1:
            changes[index] = replace(entry, generation=_wrong(entry.generation, rng))
        case RowOpened() as entry, 2:
            changes[index] = replace(entry, max_len=_wrong(entry.max_len, rng))
        case RowOpened() as entry, _:
            changes[index] = replace(entry, token_ids=_wrong_tokens(entry.token_ids, rng))
        case _:
            del changes[index]
    return replace(update, **{kind: changes})


def _damage_reply(frame: bytes, rng: random.Random) -> bytes:
    """The frame with one number of one branch changed, or what it answers."""
    reply = decode_drafter_frame(frame, 1 << 20)
    assert isinstance(reply, DraftReply)
    branches = reply.branches
    if not len(branches):
        return encode_reply(replace(reply, answered_sequence=max(0, _wrong(reply.answered_sequence, rng))))
    column = rng.choice(["row", "generation", "base_len", "token_ids"])
    numbers: np.ndarray = getattr(branches, column).copy()
    index = rng.randrange(len(numbers))
    numbers[index] = _wrong(int(numbers[index]), rng)
    damaged: BranchBatch = replace(branches, **{column: numbers})
    return encode_reply(replace(reply, branches=damaged))


def _wrong(number: int, rng: random.Random) -> int:
    """Another number that an int32 can hold: near the right one, or an extreme one."""
    wrong = number + rng.choice([-2, -1, 1, 2]) if rng.random() < 0.6 else rng.choice(_WRONG_NUMBERS)
    return max(-(1 << 31), min(wrong, (1 << 31) - 1))


def _wrong_tokens(token_ids: list[int], rng: random.Random) -> list[int]:
    tokens = list(token_ids)
    index = rng.randrange(len(tokens))
    tokens[index] = _wrong(tokens[index], rng)
    return tokens


def _garble(frame: bytes, rng: random.Random) -> bytes:
    """Some bits are others, or the end is missing."""
    garbled = bytearray(frame)
    if not garbled or rng.random() < 0.3:
        return frame[: rng.randrange(len(frame) + 1)]
    for _ in range(rng.choice([1, 1, 8])):
        garbled[rng.randrange(len(garbled))] ^= 1 << rng.randrange(8)
    return bytes(garbled)
