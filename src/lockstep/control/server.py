"""The end of a control channel that others connect to: one thread, which reads, writes and calls the handlers."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from lockstep.control.awake import AwakeClock
from lockstep.control.peer import Connection
from lockstep.control.peer import ControlConnection as ControlConnection
from lockstep.control.peer import Handler as Handler
from lockstep.control.secret import Secret
from lockstep.control.session import OtherSecretError, close_after_fork, listening_socket, tune
from lockstep.errors import ControlError

TICK_S = 0.2
FLUSH_AT_CLOSE_S = 1.0
# Connections that are not authenticated yet.
MAX_PENDING_CONNECTIONS = 256
ACCEPTED_AT_ONCE = 64
CLOSE_S = 5.0

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Server:
    """Listens on one address, and gives the messages of those who know the secret to the handlers.

    Whoever does not prove within 5 s that it knows the secret, or sends anything else than messages for a
    handler, is disconnected; that disturbs nobody else. A peer that lets 4 MiB wait is disconnected, too. An
    exception in a handler is logged; if a message led to it, its sender is disconnected.

    Args:
        secret: what clients must know.
        host: the address of this machine to bind to, and no other.
        port: 0 for a free one.
        handlers: by the first part of the ``kind`` of their messages.
        secret_refused: is told the address of each client that has another secret; called as handlers are.
        clock: what handlers are told as the time, looked at in their thread.

    Raises:
        ConfigError: the host is not an address of this machine, or the port is taken.
    """

    def __init__(
        self,
        secret: Secret,
        host: str,
        port: int = 0,
        handlers: Mapping[str, Handler] | None = None,
        secret_refused: Callable[[str], None] = lambda address: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._secret = secret
        self._clock = clock or AwakeClock()
        self._handlers = dict(handlers or {})
        self._secret_refused = secret_refused
        self._listener = listening_socket(host, port)
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (bound[0], bound[1])
        self._connections: dict[Connection, ControlConnection] = {}
        # Not authenticated yet, oldest first.
        self._pending_connections: dict[Connection, None] = {}
        self._changed: dict[Connection, None] = {}
        self._posts: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)
        self._accepting = True
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="lockstep-control", daemon=True)
        close_after_fork(self)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread that calls the handlers; its result, or its exception.

        Raises:
            ControlError: the server is closed or was not started.
        """
        if threading.current_thread() is self._thread:
            return function()
        if self._thread.ident is None:
            raise ControlError("The server was not started, so it cannot run anything. Call start() first.")
        future: Future[Result] = Future()

        def run() -> None:
            if self._ended.is_set():
                future.set_exception(
                    ControlError("The server is closed, so it cannot run anything. Start a new server.")
                )
                return
            try:
                future.set_result(function())
            except BaseException as error:
                # It is the caller's, who gets it.
                future.set_exception(error)

        self._post(run)
        return future.result()

    def close(self) -> None:
        """Stop: what was sent leaves as far as it can within 1 s. Handlers hear of no loss. Closing again is fine."""
        self._closing = True
        if self._thread.ident is None:
            self._close_sockets()
        elif threading.current_thread() is not self._thread:
            self._wake()
            # Not without a limit: a handler may be stuck.
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        next_tick = time.monotonic()
        try:
            while not self._closing:
                for key, events in self._selector.select(max(next_tick - time.monotonic(), 0)):
                    if isinstance(key.data, Connection):
                        self._exchange(key.data, events)
                    else:
                        key.data()
                self._run_posts()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
                self._act_on_changes()
            self._flush_all()
        finally:
            self._ended.set()
            # Who has posted meanwhile waits for a result, and gets an error.
            self._run_posts()
            self._close_sockets()

    def _tick(self, now: float) -> None:
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = True
        for pending in self._pending_connections:
            if now >= pending.deadline:
                pending.end()
        awake_s = self._clock()
        for handler in self._handlers.values():
            _guarded(handler.tick, awake_s)

    def _exchange(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not events & selectors.EVENT_READ or connection.ended:
            return
        try:
            for message in connection.read():
                self._deliver(connection, message)
                if connection.ended:
                    return
        except OtherSecretError:
            _guarded(self._secret_refused, connection.address[0])
            connection.refuse()
        except (OSError, ControlError):
            connection.end()

    def _deliver(self, connection: Connection, message: Mapping[str, object]) -> None:
        kind = message.get("kind")
        name, _, verb = kind.partition(".") if isinstance(kind, str) else ("", "", "")
        handler = self._handlers.get(name)
        if handler is None or not verb:
            connection.end()
            return
        connection.handler_names[name] = None
        if not _guarded(handler.received, self._connections[connection], message):
            connection.end()

    def _act_on_changes(self) -> None:
        """Act on what changed: handlers who hear of a loss may send to others, and end them."""
        while self._changed:
            connection, _ = self._changed.popitem()
            if connection not in self._connections:
                continue
            if connection.ended or connection.authenticated:
                self._pending_connections.pop(connection, None)
            if connection.ended:
                self._drop(connection)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: Connection) -> None:
        # What a handler sent last leaves, if it can.
        connection.flush()
        peer = self._connections.pop(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for name in connection.handler_names:
            _guarded(self._handlers[name].lost, peer)

    def _accept(self) -> None:
        # So many at most: whoever is connected waits meanwhile.
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                # The client left before it was accepted.
                continue
            except OSError:
                # No descriptor is left: accept again at the next tick.
                self._end_oldest_pending()
                self._selector.unregister(self._listener)
                self._accepting = False
                return
            try:
                accepted.setblocking(False)
                tune(accepted)
            except OSError:
                accepted.close()
                continue
            connection = Connection(accepted, (address[0], address[1]), self._secret, self._mark_changed)
            self._connections[connection] = ControlConnection(connection, self._in_dispatcher)
            self._pending_connections[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            if len(self._pending_connections) > MAX_PENDING_CONNECTIONS:
                self._end_oldest_pending()

    def _end_oldest_pending(self) -> None:
        for pending in self._pending_connections:
            if not pending.ended:
                pending.end()
                return

    def _mark_changed(self, connection: Connection) -> None:
        self._changed[connection] = None

    def _flush_all(self) -> None:
        deadline = time.monotonic() + FLUSH_AT_CLOSE_S
        while time.monotonic() < deadline:
            waiting = [one for one in self._connections if one.wants_to_write and not one.ended]
            if not waiting:
                return
            for connection in waiting:
                connection.flush()
            time.sleep(0.005)

    # -- from other threads --------------------------------------------------------------------------

    def _in_dispatcher(self, function: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            function()
        else:
            self._post(function)

    def _post(self, function: Callable[[], None]) -> None:
        # No lock: a signal handler of the thread that posts may post, too.
        self._posts.append(function)
        self._wake()
        # The thread may have run its last posts before: then nobody else would run this one.
        if self._ended.is_set():
            self._run_posts()

    def _run_posts(self) -> None:
        # Those that are there now: one of them may post again.
        for _ in range(len(self._posts)):
            try:
                post = self._posts.popleft()
            except IndexError:
                # Another thread was faster, after the end.
                return
            post()

    def _wake(self) -> None:
        # If the pipe is full, the thread wakes anyway; if it is closed, there is none to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_reader.recv(4096)

    def _close_sockets(self) -> None:
        for connection in self._connections:
            connection.socket.close()
        for one in (self._listener, self._wake_reader, self._wake_writer):
            one.close()
        self._selector.close()

    def _close_in_child(self) -> None:
        self._closing = True
        self._ended.set()
        self._posts.clear()
        # Closed, not unregistered: parent and child share what the selector's descriptor stands for.
        self._close_sockets()


def _guarded(function: Callable[..., None], *arguments: object) -> bool:
    """Call a handler: True when it did its work. An exception is logged, without what a message held."""
    try:
        function(*arguments)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        file = os.path.basename(place.filename)
        log.error("A handler of messages failed: %s at %s:%s", type(error).__name__, file, place.lineno)
        return False
    return True
