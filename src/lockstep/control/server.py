"""The end of a control channel that others connect to: one thread, whose event loop serves all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import selectors
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol, TypeVar

from lockstep.control import session
from lockstep.control.awake import AwakeClock
from lockstep.control.secret import Secret
from lockstep.control.session import (
    OtherSecretError,
    Session,
    close_after_fork,
    encode,
    listening_socket,
    tune,
)
from lockstep.errors import ControlError

TICK_S = 0.2
HANDSHAKE_S = 5.0
FLUSH_AT_CLOSE_S = 1.0
CLOSE_S = 5.0
MAX_QUEUED_BYTES = 4 * 1024 * 1024
READ_BYTES = 64 * 1024
# Connections that are not authenticated yet.
MAX_PENDING_CONNECTIONS = 256

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class ControlConnection:
    """Who sent a message; handlers keep in ``data`` what they know of it.

    ``address`` is the other end's host and port.
    """

    def __init__(self, accepted: socket.socket, address: tuple[str, int], server: Server) -> None:
        self.address = address
        self.data: dict[str, object] = {}
        self.socket = accepted
        self.ended = False
        self.handler_names: dict[str, None] = {}
        self.session: Session | None = None
        self.writer: asyncio.StreamWriter | None = None
        self._server = server
        self.task = server.loop.create_task(server.talk(self))

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message; from any thread. A peer that is gone, or does not read what it was sent, is dropped.

        Raises:
            ControlError: only if the message is not a mapping of JSON values of at most 1 MiB.
        """
        payload = encode(message)
        self._server.in_thread(lambda: self._write(payload))

    def close(self) -> None:
        """End the connection, after what was sent before as far as it can leave within 1 s; from any thread."""
        self._server.in_thread(self.end)

    def end(self) -> None:
        """End the connection, in the server's thread."""
        if not self.ended:
            self.ended = True
            self.task.cancel()

    def _write(self, payload: bytes) -> None:
        if self.ended or self.session is None or self.writer is None:
            return
        frame = self.session.writer.frame(payload)
        # A peer that reads too slowly is dropped: its queue would grow without a bound.
        if self.writer.transport.get_write_buffer_size() + len(frame) > MAX_QUEUED_BYTES:
            self.writer.transport.abort()
            self.end()
        else:
            self.writer.write(frame)

    def __repr__(self) -> str:
        return f"ControlConnection{self.address}"


class Handler(Protocol):
    """What a server does with messages. All calls come from one thread, so a handler needs no locks."""

    def received(self, peer: ControlConnection, message: Mapping[str, object]) -> None:
        """Take a message whose ``kind`` is ``<this handler's name>.<verb>``."""

    def lost(self, peer: ControlConnection) -> None:
        """Hear that a peer this handler had a message from is gone, or was closed; once, and last."""

    def tick(self, now: float) -> None:
        """Look at the time; called every 0.2 s with that of an ``AwakeClock``."""


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
        self._peers: dict[ControlConnection, None] = {}
        # Not authenticated yet, oldest first.
        self._pending: dict[ControlConnection, None] = {}
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._closing = asyncio.Event()
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
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                # It is the caller's, who gets it.
                future.set_exception(error)

        self.in_thread(run)
        while not future.done() and self._thread.is_alive():
            concurrent.futures.wait([future], TICK_S)
        if not future.done():
            raise ControlError("The server does not run, so it cannot run anything. Start a new server.")
        return future.result()

    def in_thread(self, function: Callable[[], None]) -> None:
        """Run a function in the thread that calls the handlers, soon; nothing once that has ended."""
        if threading.current_thread() is self._thread:
            function()
        elif self._thread.is_alive():
            # It may end, and close its loop, meanwhile.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Stop: what was sent leaves as far as it can within 1 s. Handlers hear of no loss. Closing again is fine."""
        self.in_thread(self._closing.set)
        if self._thread.ident is None:
            self._listener.close()
            self.loop.close()
        elif threading.current_thread() is not self._thread:
            # Not without a limit: a handler may be stuck.
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    # -- in the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        finally:
            # Those whose task had not begun are still open.
            for one in (self._listener, *(peer.socket for peer in self._peers)):
                one.close()
            self.loop.close()

    async def _run(self) -> None:
        background = [self.loop.create_task(self._accept()), self.loop.create_task(self._tick())]
        await self._closing.wait()
        for task in background:
            task.cancel()
        for peer in self._peers:
            peer.end()
        await asyncio.gather(*background, *(peer.task for peer in self._peers), return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            awake_s = self._clock()
            for handler in self._handlers.values():
                _guarded(handler.tick, awake_s)
            await asyncio.sleep(TICK_S)

    async def _accept(self) -> None:
        while True:
            try:
                accepted, address = await self.loop.sock_accept(self._listener)
                tune(accepted)
            except ConnectionError:
                # The client left before it was accepted.
                continue
            except OSError:
                # No descriptor is left.
                self._end_oldest_pending()
                await asyncio.sleep(TICK_S)
                continue
            peer = ControlConnection(accepted, (address[0], address[1]), self)
            self._peers[peer] = self._pending[peer] = None
            if len(self._pending) > MAX_PENDING_CONNECTIONS:
                self._end_oldest_pending()
            # A flood of strangers leaves the others their turns. And only a task that has begun can be ended.
            await asyncio.sleep(0)

    def _end_oldest_pending(self) -> None:
        oldest = next((peer for peer in self._pending if not peer.ended), None)
        if oldest is not None:
            oldest.end()

    async def talk(self, peer: ControlConnection) -> None:
        """Shake hands with a client, and give its messages to their handlers, until one end closes."""
        try:
            reader, peer.writer = await asyncio.open_connection(sock=peer.socket)
            peer.session = await asyncio.wait_for(self._shake_hands(reader, peer.writer), HANDSHAKE_S)
            self._pending.pop(peer, None)
            while not peer.ended and (received := await reader.read(READ_BYTES)):
                for message in peer.session.reader.messages(received):
                    self._deliver(peer, message)
                    if peer.ended:
                        break
        except OtherSecretError:
            _guarded(self._secret_refused, peer.address[0])
            # No proof: it says to the client that this is final.
            if peer.writer is not None:
                peer.writer.write(bytes(session.PROOF_BYTES))
        except (OSError, EOFError, ControlError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            peer.ended = True
            self._pending.pop(peer, None)
            for name in peer.handler_names if not self._closing.is_set() else ():
                _guarded(self._handlers[name].lost, peer)
            await _flush_and_close(peer)
            self._peers.pop(peer, None)

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Session:
        greeted = session.greeting()
        writer.write(greeted)
        proof, found = session.welcome(self._secret, greeted, await reader.readexactly(session.ANSWER_BYTES))
        writer.write(proof)
        return found

    def _deliver(self, peer: ControlConnection, message: Mapping[str, object]) -> None:
        kind = message.get("kind")
        name, _, verb = kind.partition(".") if isinstance(kind, str) else ("", "", "")
        handler = self._handlers.get(name)
        if handler is None or not verb:
            peer.end()
            return
        peer.handler_names[name] = None
        if not _guarded(handler.received, peer, message):
            peer.end()

    def _close_in_child(self) -> None:
        # The parent's loop is not to hear of it: its selector is closed, not changed.
        self._selector.close()
        for one in (self._listener, *(peer.socket for peer in self._peers)):
            one.close()


async def _flush_and_close(peer: ControlConnection) -> None:
    if peer.writer is None:
        peer.socket.close()
        return
    peer.writer.close()
    with suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(peer.writer.wait_closed(), FLUSH_AT_CLOSE_S)
    peer.writer.transport.abort()


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
