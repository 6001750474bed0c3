"""The end of a control channel that connects."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping

from lockstep.control import session
from lockstep.control.secret import Secret
from lockstep.control.session import close_after_fork, encode, name_of, reason_of, tune
from lockstep.errors import ControlError

READ_BYTES = 64 * 1024


class SilentError(ControlError):
    """Nobody answers at an address, or not in time: whoever listens there may be stopped, busy, or not there yet."""


class Client:
    """A connection to a :class:`~lockstep.control.server.Server`.

    One thread may send while another receives; several may send. Not for signal handlers: one that interrupts
    a thread which sends would wait for it for ever.

    Args:
        address: host and port of the server.
        secret: the secret that the server has, too.
        timeout_s: how long connecting and authenticating may take, and later the sending of one message.

    Raises:
        SilentError: nobody answers there in time.
        ControlError: who answers does not know the secret, or is no server.
    """

    def __init__(self, address: tuple[str, int], secret: Secret, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._received: deque[dict[str, object]] = deque()
        self._lost: ControlError | None = None
        deadline = time.monotonic() + timeout_s
        self._socket = self._connected(deadline)
        close_after_fork(self)
        try:
            tune(self._socket)
            self._socket.setblocking(False)
            greeted = self._read_exactly(session.GREETING_BYTES, deadline)
            answered = session.answer(secret, greeted)
            self._write(answered, deadline)
            proof = self._read_exactly(session.PROOF_BYTES, deadline)
            self._session = session.finish(secret, greeted, answered, proof)
        except (_ConnectionEnded, ConnectionError):
            self.close()
            raise SilentError(
                f"{name_of(address)} ended the connection before it was authenticated: it has too many others, or "
                "is not a Lockstep launcher. Try again, or correct the address."
            ) from None
        except ControlError as error:
            self.close()
            raise type(error)(
                f"Cannot connect to {name_of(address)}: {error}. Check the address. Give both ends the same secret."
            ) from None
        except BaseException:
            self.close()
            raise

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message.

        Raises:
            ControlError: the server is gone, or takes nothing for ``timeout_s``, or the message is not a mapping
                of JSON values of at most 1 MiB. Only after the last of these the client can still be used.
        """
        payload = encode(message)
        with self._sending:
            self._check_open()
            try:
                self._write(self._session.writer.frame(payload), time.monotonic() + self._timeout_s)
            except (OSError, ControlError) as error:
                # A part of a frame may have left.
                raise self._give_up(error) from None

    def receive(self, timeout_s: float | None) -> dict[str, object] | None:
        """The next message; None when there is none within ``timeout_s`` (None: wait as long as it takes).

        Raises:
            ControlError: the server is gone, or its bytes are not authentic.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._receiving:
            while not self._received:
                self._check_open()
                try:
                    if not self._wait(select.POLLIN, deadline):
                        return None
                    self._received.extend(self._session.reader.messages(self._read(READ_BYTES)))
                except (OSError, ControlError) as error:
                    self._give_up(error)
            return self._received.popleft()

    def close(self) -> None:
        """Leave; a thread that waits in :meth:`receive` gets a ControlError. Closing again does nothing."""
        with contextlib.suppress(OSError):
            # Wakes the thread that waits.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    # -- bytes ---------------------------------------------------------------------------------------

    def _connected(self, deadline: float) -> socket.socket:
        try:
            # The system would take the remainder.
            if not 0 < self.address[1] <= 65535:
                raise ValueError("ports are 1 to 65535")
            return socket.create_connection(self.address, max(deadline - time.monotonic(), 0.001))
        except (OSError, OverflowError, ValueError) as error:
            # ValueError: a host that is no name, too.
            raise SilentError(
                f"Cannot reach {name_of(self.address)}: {reason_of(error)}. Check that the launcher there runs, and "
                f"that nothing between the machines blocks this port."
            ) from None

    def _read(self, limit: int) -> bytes:
        try:
            received = self._socket.recv(limit)
        except BlockingIOError:
            return b""
        if not received:
            raise _ConnectionEnded
        return received

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        received = b""
        while len(received) < size:
            self._wait_or_fail(select.POLLIN, deadline)
            received += self._read(size - len(received))
        return received

    def _write(self, content: bytes, deadline: float) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait_or_fail(select.POLLOUT, deadline)

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Whether the socket became ready in time; ``select.select`` could not take descriptors above 1023."""
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise _ConnectionEnded
        poll = select.poll()
        poll.register(descriptor, event)
        left_ms = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
        return bool(poll.poll(left_ms))

    def _wait_or_fail(self, event: int, deadline: float) -> None:
        if not self._wait(event, deadline):
            raise SilentError(f"it did not answer within {self._timeout_s:g} s")

    def _check_open(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._socket.fileno() < 0:
            raise ControlError(f"The connection to {name_of(self.address)} is closed. Make a new client.")

    def _give_up(self, error: Exception) -> ControlError:
        # close() was called while this thread waited.
        if self._socket.fileno() < 0:
            error = ControlError("it was closed here")
        self.close()
        self._lost = ControlError(
            f"The connection to {name_of(self.address)} is lost: {reason_of(error)}. Read what the launcher "
            "there reported."
        )
        return self._lost

    def _close_in_child(self) -> None:
        # No shutdown: that would end the parent's connection, too.
        self._socket.close()


class _ConnectionEnded(ControlError):
    """The other end closed the connection."""

    def __init__(self) -> None:
        super().__init__("the other end closed it")
